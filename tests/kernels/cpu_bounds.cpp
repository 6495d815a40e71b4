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

// Rows with padding between them, but none after the last row.
struct Rows : Memory {
  Rows(Side side, DType dtype, int64_t rows, int64_t cols, int64_t padding, int64_t missing = 0)
      : Memory(side, dtype, (rows - 1) * (cols + padding) + cols, missing),
        arg{data(), dtype, {1, {rows}, {(cols + padding) * size_of(dtype)}}} {}
  RowsArg arg;
};

struct Shape {
  int64_t rows, groups, cols, padding;
};

// The residual and the backward's input have `residual_dtype`.
void run(Side side, DType dtype, DType residual_dtype, DType weight_dtype, const Shape& shape) {
  const auto [rows, groups, cols, padding] = shape;
  const auto rows_of = [&](DType dtype) { return Rows(side, dtype, rows, cols, padding); };
  const Rows input = rows_of(dtype), grad_output = rows_of(dtype), residual = rows_of(residual_dtype),
             grad_residual = rows_of(residual_dtype), residual_out = rows_of(residual_dtype),
             grad_input = rows_of(residual_dtype);
  const Memory weight(side, weight_dtype, groups * cols), grad_weight(side, weight_dtype, groups * cols);
  const Memory scale(side, compute_dtype(dtype), groups * padded_cols(dtype, cols));
  const Memory residual_scale(side, compute_dtype(dtype), groups * padded_cols(residual_dtype, cols));
  constexpr int64_t kRowsPerLeaf = 12;
  const Region all_rows = {0, rows / groups, 0, groups};
  // The largest number of sums that exist at the same time.
  const int64_t leaves = divide_up(rows / groups, kRowsPerLeaf);
  int sum_count_at_once = 0;
  for (int64_t leaf = 0; leaf < leaves; leaf++) sum_count_at_once = std::max(sum_count_at_once, sum_count(0, leaf) + 1);
  struct SumMemory : Memory {
    SumMemory(Side side, DType dtype, int64_t count, int64_t stride)
        : Memory(side, compute_dtype(dtype), count * stride), stride(stride) {}
    int64_t stride;
  };
  const SumMemory sums(side, dtype, sum_count_at_once, groups * padded_cols(residual_dtype, cols));
  const Rows output(side, dtype, rows, cols, padding, is_short);

  const RmsNormKernels& kernels = rms_norm_kernels();
  for (int64_t group = 0; group < groups; group++) {
    const char* const of_group = weight.data() + group * cols * size_of(weight_dtype);
    const auto convert = [&](DType dtype, const Memory& scale) {
      char* const target = scale.data() + group * padded_cols(dtype, cols) * size_of(compute_dtype(dtype));
      kernels.scale(dtype, weight_dtype, of_group, 1.0, target, cols);
    };
    convert(dtype, scale);
    convert(residual_dtype, residual_scale);
  }
  CpuArgs args = {};
  args.rows = rows, args.cols = args.size = cols;
  args.eps = 1e-5, args.alpha = 1;
  args.weight = {weight.data(), weight_dtype, 1, groups};
  args.non_temporal = true, args.part_rows = rows, args.rows_per_leaf = kRowsPerLeaf;
  using Tensors = std::initializer_list<std::pair<TensorIndex, const Rows*>>;
  const auto with = [](CpuArgs args, Tensors tensors, const Memory* scale = nullptr) {
    for (const auto& [index, rows] : tensors) args.tensors[index] = rows == nullptr ? nullptr : &rows->arg;
    if (scale != nullptr) args.scale = scale->data();
    return args;
  };
  const CpuArgs forward = with(args, {{kInput, &input}, {kOutput, &output}}, &scale);
  const CpuArgs add = with(forward, {{kResidual, &residual}, {kResidualOut, &residual_out}}, &residual_scale);
  const auto with_held = [&](CpuArgs args, const auto& run) {
    const Memory scratch(side, compute_dtype(args.dtype()), scratch_rows(args) * padded_cols(args.dtype(), cols));
    args.row_scratch = scratch.data();
    run(args);
  };
  const auto run_forward = [&](const auto& kernel, const auto& args) {
    with_held(args, [&](const auto& args) { kernel(args, 0, rows); });
  };
  const auto run_backward = [&](const auto& kernel, const auto& args) {
    with_held(args, [&](const auto& args) { kernel(args, all_rows); });
  };
  run_forward(kernels.forward, forward);
  run_forward(add_rms_norm_kernel(), add);

  const Rows square_sum(side, compute_dtype(dtype), rows, 1, padding),
      dot(side, compute_dtype(dtype), rows, 1, padding);
  CpuArgs stats = with(args, {{kInput, &input}, {kSquareSum, &square_sum}});
  stats.sums = Sums::output;
  kernels.forward(stats, 0, rows);
  CpuArgs from_stats = with(forward, {{kSquareSum, &square_sum}});
  from_stats.sums = Sums::input;
  run_forward(kernels.forward, from_stats);

  const RmsNormBackwardKernels& backward_kernels = rms_norm_backward_kernels();
  const auto backward_args = [&](int wants) {  // grad_input, grad_weight, grad_residual
    CpuArgs backward = with(args,
                            {{kGradOutput, &grad_output},
                             {kInput, &residual},
                             {kGradResidual, wants & 4 ? &grad_residual : nullptr},
                             {kGradInput, wants & 1 ? &grad_input : nullptr}},
                            &residual_scale);
    if (wants & 2) backward.grad_weight_sums = sums.data(), backward.sum_stride = sums.stride;
    return backward;
  };
  const auto with_sums = [&](const CpuArgs& args, Sums sums) {
    CpuArgs result = with(args, {{kSquareSum, &square_sum}, {kDot, &dot}});
    result.sums = sums;
    return result;
  };
  with_held(with_sums(backward_args(0), Sums::output),
            [&](const CpuArgs& args) { backward_kernels.backward(args, all_rows); });
  for (const int wants : {1, 2, 3, 5, 7}) {
    run_backward(backward_kernels.backward, backward_args(wants));
    run_backward(backward_kernels.backward, with_sums(backward_args(wants), Sums::input));
  }
  // The backward of operators whose input has grad_output's dtype.
  const Rows grad_of_input = rows_of(dtype);
  const auto backward_of_input = [&](bool wants_grad_input, const SumMemory* sums) {
    CpuArgs backward =
        with(args,
             {{kGradOutput, &grad_output}, {kInput, &input}, {kGradInput, wants_grad_input ? &grad_of_input : nullptr}},
             &scale);
    if (sums != nullptr) backward.grad_weight_sums = sums->data(), backward.sum_stride = sums->stride;
    return backward;
  };
  // The gate has the residual's dtype.
  const Rows gate = rows_of(residual_dtype), grad_gate = rows_of(residual_dtype);
  const SumMemory gated_sums(side, dtype, sum_count_at_once, groups * padded_cols(dtype, cols));
  for (const Gating gating : {Gating{Activation::silu, true}, Gating{Activation::silu, false}}) {
    CpuArgs gated = with(forward, {{kGate, &gate}});
    gated.gating = gating;
    for (const bool stream : {true, false}) {
      gated.non_temporal = stream;
      run_forward(gated_rms_norm_kernel(), gated);
    }
    for (const int wants : {1, 2, 4, 7}) {  // grad_input, grad_gate, grad_weight
      CpuArgs backward = with(backward_of_input(wants & 1, wants & 4 ? &gated_sums : nullptr),
                              {{kGate, &gate}, {kGradGate, wants & 2 ? &grad_gate : nullptr}});
      backward.gating = gating;
      run_backward(gated_rms_norm_backward_kernel(), backward);
    }
  }
  std::vector<ParameterSum> left;
  each_sum(0, leaves, [&](int64_t, int64_t) {
    const int64_t first = static_cast<int64_t>(left.size()) * sums.stride * size_of(compute_dtype(dtype));
    left.push_back({sums.data() + first, left.empty() ? 0 : 1});
  });
  for (int64_t group = 0; group < groups; group++) {
    const int64_t scratch = padded_cols(residual_dtype, cols);
    backward_kernels.grad_weight(residual_dtype, weight_dtype, left.data(), static_cast<int64_t>(left.size()),
                                 group * scratch, grad_weight.data() + group * cols * size_of(weight_dtype), cols);
  }
  // cos and sin have the residual's dtype; up to three rows share their angles.
  each_rotation(cols, [&](const RotaryColumns& paired, bool angle_of_pair) {
    const int64_t angles = angle_of_pair ? paired.pairs : 2 * paired.pairs, heads = rows % 3 == 0 ? 3 : 1;
    Rows cos(side, residual_dtype, rows / heads, angles, 0), sin(side, residual_dtype, rows / heads, angles, 0);
    cos.arg.layout = sin.arg.layout = {2, {rows / heads, heads}, {angles * size_of(residual_dtype), 0}};
    const auto rotated = [&](CpuArgs args, const Memory& scale) {
      args.rotation = {paired.are_interleaved, angle_of_pair, paired.offset, paired.pairs};
      return with(args, {{kCos, &cos}, {kSin, &sin}}, &scale);
    };
    const ScaleLayout order(dtype, cols, paired);
    const Memory scale(side, compute_dtype(dtype), groups * order.packed_cols());
    const SumMemory sums(side, dtype, sum_count_at_once, groups * order.packed_cols());
    run_forward(rms_norm_rope_kernel(), rotated(forward, scale));
    for (const int wants : {1, 2, 3}) {  // grad_input, grad_weight
      const CpuArgs backward = backward_of_input(wants & 1, wants & 2 ? &sums : nullptr);
      run_backward(rms_norm_rope_backward_kernel(), rotated(backward, scale));
    }
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
