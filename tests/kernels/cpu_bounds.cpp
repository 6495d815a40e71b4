// Runs the CPU kernels on buffers of exactly the required size, between inaccessible guard pages: an access one byte
// beyond a buffer ends the program. With the argument "short", one output lacks its last byte.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "isa.h"
#include "kernel_problem.h"

namespace {

using namespace normops;
using namespace normops::cpu;

enum class Side { begin, end };

bool is_short = false;

// Memory with one side at an inaccessible guard page.
class Memory {
 public:
  Memory(Side side, DType dtype, int64_t count, int64_t missing = 0) {
    constexpr size_t kPage = 4096;
    const size_t bytes = count * size_of(dtype) - missing;
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    size_ = room + 2 * kPage;
    pages_ = static_cast<char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages_ == MAP_FAILED || mprotect(pages_ + kPage, room, PROT_READ | PROT_WRITE) != 0) std::abort();
    data_ = pages_ + kPage + (side == Side::begin ? 0 : room - bytes);
    std::memset(data_, 0x3c, bytes);
  }
  Memory(const Memory&) = delete;
  ~Memory() { munmap(pages_, size_); }
  char* data() const { return data_; }

 private:
  size_t size_;
  char *pages_, *data_;
};

struct Shape {
  int64_t rows, groups, cols, padding;
};

void run(Side side, DType dtype, DType residual_dtype, DType weight_dtype, const Shape& shape) {
  const auto [rows, groups, cols, padding] = shape;
  constexpr int64_t kRowsPerLeaf = 12;
  const auto make = [side](DType dtype, int64_t count) { return Memory(side, dtype, count); };
  KernelProblem p(make, dtype, residual_dtype, weight_dtype, rows, cols, kRowsPerLeaf, groups, padding);
  p.each([](CpuArgs& args) { args.non_temporal = true; });
  const Memory short_output(side, dtype, p.count, 1);
  if (is_short) p.of_output.data = short_output.data();

  // The memory of parameters for kernels of a dtype; sums have room for the largest number that exists at a time.
  struct Parameters {
    Memory scale, sums;
    int64_t stride;
  };
  int sum_count_at_once = 0;
  for (int64_t leaf = 0; leaf < p.leaves; leaf++)
    sum_count_at_once = std::max(sum_count_at_once, sum_count(0, leaf) + 1);
  const auto parameters = [&](DType dtype, const RotaryColumns& paired = {}) {
    const int64_t stride = groups * ScaleLayout(dtype, cols, paired).packed_cols();
    return Parameters{Memory(side, compute_dtype(dtype), stride),
                      Memory(side, compute_dtype(dtype), sum_count_at_once * stride), stride};
  };
  const auto with_memory = [&](CpuArgs args, const Parameters& of, const auto& call) {
    const Memory scratch(side, compute_dtype(args.dtype()), scratch_rows(args) * padded_cols(args.dtype(), cols));
    args.scale = of.scale.data(), args.row_scratch = scratch.data(), args.sum_stride = of.stride;
    call(args);
  };
  const auto run_forward = [&](ForwardKernel kernel, const CpuArgs& args, const Parameters& of) {
    with_memory(args, of, [&](const CpuArgs& args) { kernel(args, 0, rows); });
  };
  using Without = std::initializer_list<TensorIndex>;
  const auto run_backward = [&](BackwardKernel kernel, CpuArgs args, const Parameters& of, bool sums_rows,
                                Without without) {
    for (const TensorIndex index : without) args.tensors[index] = nullptr;
    args.grad_weight_sums = sums_rows ? of.sums.data() : nullptr;
    with_memory(args, of, [&](const CpuArgs& args) { kernel(args, p.all_rows); });
  };

  const Parameters of_input = parameters(dtype), of_residual = parameters(residual_dtype);
  p.make_scale(dtype, 1.0, {}, of_input.scale.data());
  p.make_scale(residual_dtype, 1.0, {}, of_residual.scale.data());
  for (const CpuArgs* args : {&p.forward, &p.stats, &p.from_stats}) {
    run_forward(rms_norm_kernels().forward, *args, of_input);
  }
  run_forward(add_rms_norm_kernel(), p.add, of_residual);
  const BackwardKernel backward = rms_norm_backward_kernels().backward;
  run_backward(backward, p.backward_stats, of_residual, false, {});
  for (const CpuArgs* args : {&p.backward, &p.backward_from_stats}) {
    for (const bool sums_rows : {false, true}) {
      for (const Without& without : {Without{kGradResidual}, Without{}}) {
        run_backward(backward, *args, of_residual, sums_rows, without);
      }
    }
    run_backward(backward, *args, of_residual, true, {kGradResidual, kGradInput});
  }
  p.sum_grad_weight(residual_dtype, {}, of_residual.sums.data(),
                    of_residual.stride * size_of(compute_dtype(residual_dtype)));
  for (const Gating gating : {Gating{Activation::silu, true}, Gating{Activation::silu, false}}) {
    p.gated.gating = p.gated_backward.gating = gating;
    for (const bool stream : {true, false}) {
      p.gated.non_temporal = stream;
      run_forward(gated_rms_norm_kernel(), p.gated, of_input);
    }
    const BackwardKernel kernel = gated_rms_norm_backward_kernel();
    run_backward(kernel, p.gated_backward, of_input, false, {kGradGate});
    run_backward(kernel, p.gated_backward, of_input, false, {kGradInput});
    run_backward(kernel, p.gated_backward, of_input, true, {kGradInput, kGradGate});
    run_backward(kernel, p.gated_backward, of_input, true, {});
  }
  // Up to three rows share their angles.
  each_rotation(cols, [&](const RotaryColumns& paired, bool angle_of_pair) {
    const int64_t heads = rows % 3 == 0 ? 3 : 1, angles = angle_of_pair ? paired.pairs : 2 * paired.pairs;
    const Memory cos(side, residual_dtype, rows / heads * angles), sin(side, residual_dtype, rows / heads * angles);
    p.set_rotation(paired, angle_of_pair, heads);
    p.of_cos.data = cos.data(), p.of_sin.data = sin.data();
    const Parameters of_rotated = parameters(dtype, paired);
    run_forward(rms_norm_rope_kernel(), p.rope, of_rotated);
    const BackwardKernel kernel = rms_norm_rope_backward_kernel();
    run_backward(kernel, p.rope_backward, of_rotated, false, {});
    run_backward(kernel, p.rope_backward, of_rotated, true, {kGradInput});
    run_backward(kernel, p.rope_backward, of_rotated, true, {});
  });
}

void run_channels(Side side, DType dtype, int64_t channels, int64_t positions, bool is_activated) {
  constexpr int64_t kSamples = 2;
  const int64_t rows = kSamples * positions;
  const auto like_input = [&] { return Memory(side, dtype, rows * channels); };
  const Memory scale(side, DType::float32, channels), bias(side, DType::float32, channels),
      x = like_input(), dy = like_input(), output = like_input(), grad_input = like_input();
  ChannelProblem p(dtype, kSamples, channels, positions, is_activated, scale.data(), bias.data());
  p.set(kInput, x.data()), p.set(kOutput, output.data());
  p.set(kGradOutput, dy.data()), p.set(kGradInput, grad_input.data());
  p.args.non_temporal = true;
  channel_rms_norm_kernels().forward(p.args, 0, rows);
  channel_rms_norm_kernels().backward(p.args, {0, rows, 0, 1});
}

}  // namespace

int main(int count, char** arguments) {
  std::printf("%s\n", isa_name(current_isa()));
  is_short = count > 1 && std::string_view(arguments[1]) == "short";
  std::vector<Shape> shapes;
  for (const int64_t cols : {1, 5, 16, 31, 63, 64, 100, 769, 1025}) {
    for (const int64_t rows : {1, 21}) {
      for (const int64_t padding : {0, 3}) shapes.push_back({rows, 1, cols, padding});
    }
    shapes.push_back({42, 3, cols, 3});
  }
  // Sizes that are prefetched and written with non-temporal stores.
  for (const int64_t cols : {4096, 4100}) shapes.push_back({99, 1, cols, 0});
  shapes.push_back({3300, 33, 128, 0});
  // Tiles whose outputs exceed kCachedBytes.
  shapes.push_back({2100, 1, 128, 0});
  shapes.push_back({1400, 1, 200, 3});
  for (const Side side : {Side::begin, Side::end}) {
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
      for (const int64_t channels : {1, 5, 16, 100, 1025}) {
        for (const int64_t positions : {8, 49, 64, 300, 512}) {
          for (const bool is_activated : {false, true}) run_channels(side, dtype, channels, positions, is_activated);
        }
      }
    }
    for (const DType dtype : kDTypes) {
      for (const Shape& shape : shapes) {
        for (const DType weight_dtype : kDTypes) {
          run(side, dtype, dtype, weight_dtype, shape);
          if (size_of(dtype) == 2) run(side, dtype, DType::float32, weight_dtype, shape);
        }
      }
    }
  }
}
