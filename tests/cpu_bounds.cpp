// Runs the CPU kernels on buffers of exactly the bytes that they may access, between pages that nobody may: one byte
// beyond ends the program. With the argument "short", one output lacks its last byte.
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

// Memory of which one side lies at a page that nobody may access.
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

// Rows of `stride` elements, the last one no longer than it must be.
struct Rows : Memory {
  Rows(Side side, DType dtype, int64_t rows, int64_t cols, int64_t padding, int64_t missing = 0)
      : Memory(side, dtype, (rows - 1) * (cols + padding) + cols, missing) {
    layout.dims = 1;
    layout.sizes[0] = rows;
    layout.strides[0] = cols + padding;
  }
  RowLayout layout;
};

struct Shape {
  int64_t rows, groups, cols, padding;
};

// With a residual of `residual_dtype`, which is also the dtype of the backward's input.
void run(Side side, DType dtype, DType residual_dtype, DType weight_dtype, const Shape& shape) {
  const auto [rows, groups, cols, padding] = shape;
  const auto rows_of = [&](DType dtype) { return Rows(side, dtype, rows, cols, padding); };
  const Rows input = rows_of(dtype), grad_output = rows_of(dtype), residual = rows_of(residual_dtype),
             grad_residual = rows_of(residual_dtype), residual_out = rows_of(residual_dtype),
             grad_input = rows_of(residual_dtype);
  const Memory weight(side, weight_dtype, groups * cols), grad_weight(side, weight_dtype, groups * cols);
  const Memory scale(side, compute_dtype(dtype), groups * padded_cols(dtype, cols));
  const Memory residual_scale(side, compute_dtype(dtype), groups * padded_cols(residual_dtype, cols));
  constexpr int64_t kRowsPerChunk = 12;
  const int64_t chunks = chunk_count(rows / groups, kRowsPerChunk);
  const Memory partials(side, compute_dtype(dtype), chunks * groups * padded_cols(residual_dtype, cols));
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
  const Weight of_groups = {weight.data(), weight_dtype, 1, groups};
  const auto with_scale = [&]<class Args>(const Args& args, const Memory& scale) {
    return CpuArgs<Args>{args, /*stream=*/true, kRowsPerChunk, scale.data()};
  };
  const RmsNormArgs forward = {.dtype = dtype,
                               .rows = rows,
                               .cols = cols,
                               .eps = 1e-5,
                               .weight = of_groups,
                               .input = input.data(),
                               .input_rows = input.layout,
                               .output = output.data(),
                               .output_rows = output.layout};
  const AddRmsNormArgs add = {
      forward, residual_dtype, residual.data(), residual.layout, residual_out.data(), residual_out.layout, 1.0};
  const int64_t spans = (cols + kSpan - 1) / kSpan;
  std::vector<double> squares(spans), dots(spans);
  const auto with_held = [&](auto args, const auto& run) {
    const Memory held(side, compute_dtype(args.dtype), held_rows(args) * padded_cols(args.dtype, cols));
    args.held = held.data();
    run(args);
  };
  const auto run_forward = [&](const auto& kernels, const auto& args) {
    with_held(args, [&](const auto& args) {
      kernels.rows(args, 0, rows);
      if (kernels.sums == nullptr) return;
      kernels.sums(args, rows - 1, 0, spans, squares.data());
      kernels.columns(args, rows - 1, 1.0, 0, cols);
    });
  };
  const auto run_backward = [&](const auto& kernels, const auto& args) {
    with_held(args, [&](const auto& args) {
      kernels.rows(args, 0, chunks * groups);
      if (kernels.sums == nullptr) return;
      kernels.sums(args, rows - 1, 0, spans, squares.data(), dots.data());
      kernels.columns(args, rows - 1, 1.0, 1.0, 0, cols);
    });
  };
  run_forward(kernels.forward, with_scale(forward, scale));
  run_forward(add_rms_norm_kernels(), with_scale(add, residual_scale));

  const Rows square_sum(side, compute_dtype(dtype), rows, 1, padding),
      dot(side, compute_dtype(dtype), rows, 1, padding);
  run_forward(rms_norm_stats_kernels().stats, with_scale(RmsNormStatsArgs{dtype, rows, cols, input.data(), input.layout,
                                                                          square_sum.data(), square_sum.layout},
                                                         scale));
  run_forward(rms_norm_stats_kernels().from_stats,
              with_scale(RmsNormFromStatsArgs{forward, cols, square_sum.data(), square_sum.layout}, scale));

  const RmsNormBackwardKernels& backward_kernels = rms_norm_backward_kernels();
  const auto backward_args = [&](int wants) {  // grad_input, grad_weight, grad_residual
    return RmsNormBackwardArgs{.dtype = residual_dtype,
                               .grad_output_dtype = dtype,
                               .rows = rows,
                               .cols = cols,
                               .eps = 1e-5,
                               .weight = of_groups,
                               .grad_output = grad_output.data(),
                               .grad_output_rows = grad_output.layout,
                               .input = residual.data(),
                               .input_rows = residual.layout,
                               .grad_residual = wants & 4 ? grad_residual.data() : nullptr,
                               .grad_residual_rows = grad_residual.layout,
                               .grad_input = wants & 1 ? grad_input.data() : nullptr,
                               .grad_input_rows = grad_input.layout,
                               .grad_weight_partials = wants & 2 ? partials.data() : nullptr};
  };
  const RmsNormBackwardStatsArgs stats = {backward_args(0), square_sum.data(), square_sum.layout, dot.data(),
                                          dot.layout};
  run_backward(rms_norm_backward_stats_kernels().stats, with_scale(stats, residual_scale));
  for (const int wants : {1, 2, 3, 5, 7}) {
    const RmsNormBackwardArgs args = backward_args(wants);
    run_backward(backward_kernels.backward, with_scale(args, residual_scale));
    const RmsNormBackwardFromStatsArgs from_stats = {args,       cols,      square_sum.data(), square_sum.layout,
                                                     dot.data(), dot.layout};
    run_backward(rms_norm_backward_stats_kernels().from_stats, with_scale(from_stats, residual_scale));
  }
  // That of operators whose input is of grad_output's type.
  const Rows grad_of_input = rows_of(dtype);
  const auto backward_of_input = [&](bool wants_grad_input, void* partials) {
    RmsNormBackwardArgs args = backward_args(0);
    args.dtype = dtype;
    args.input = input.data(), args.input_rows = input.layout;
    args.grad_input = wants_grad_input ? grad_of_input.data() : nullptr;
    args.grad_input_rows = grad_of_input.layout;
    args.grad_weight_partials = partials;
    return args;
  };
  // The gate is of the residual's type.
  const Rows gate = rows_of(residual_dtype), grad_gate = rows_of(residual_dtype);
  const Memory gated_partials(side, compute_dtype(dtype), chunks * groups * padded_cols(dtype, cols));
  for (const Gating gating : {Gating{Activation::silu, true}, Gating{Activation::silu, false}}) {
    const GatedRmsNormArgs gated = {forward, gating, residual_dtype, gate.data(), gate.layout};
    auto args = with_scale(gated, scale);
    for (const bool stream : {true, false}) {
      args.stream = stream;
      run_forward(gated_rms_norm_kernels(), args);
    }
    for (const int wants : {1, 2, 4, 7}) {  // grad_input, grad_gate, grad_weight
      const GatedRmsNormBackwardArgs gated = {backward_of_input(wants & 1, wants & 4 ? gated_partials.data() : nullptr),
                                              gating,
                                              residual_dtype,
                                              gate.data(),
                                              gate.layout,
                                              wants & 2 ? grad_gate.data() : nullptr,
                                              grad_gate.layout};
      run_backward(gated_rms_norm_backward_kernels(), with_scale(gated, scale));
    }
  }
  for (int64_t group = 0; group < groups; group++) {
    const int64_t held = padded_cols(residual_dtype, cols);
    backward_kernels.grad_weight(residual_dtype, weight_dtype,
                                 partials.data() + group * held * size_of(compute_dtype(dtype)), chunks, groups * held,
                                 grad_weight.data() + group * cols * size_of(weight_dtype), cols);
  }
  // cos and sin are of the residual's type, those of three rows the same.
  each_rotation(cols, [&](const PairedColumns& paired, bool angle_of_pair) {
    const int64_t angles = angle_of_pair ? paired.pairs : 2 * paired.pairs, heads = rows % 3 == 0 ? 3 : 1;
    const Memory cos(side, residual_dtype, rows / heads * angles), sin(side, residual_dtype, rows / heads * angles);
    const Rotation rotation = {
        paired.are_neighbours, angle_of_pair, residual_dtype, paired.offset,
        paired.pairs,          cos.data(),    sin.data(),     {2, {rows / heads, heads}, {angles, 0}}};
    const HeldOrder order(dtype, cols, paired);
    const Memory scale(side, compute_dtype(dtype), groups * order.held_cols());
    const Memory partials(side, compute_dtype(dtype), chunks * groups * order.held_cols());
    run_forward(rms_norm_rope_kernels(), with_scale(RmsNormRopeArgs{forward, rotation}, scale));
    for (const int wants : {1, 2, 3}) {  // grad_input, grad_weight
      const RmsNormBackwardArgs backward = backward_of_input(wants & 1, wants & 2 ? partials.data() : nullptr);
      run_backward(rms_norm_rope_backward_kernels(), with_scale(RmsNormRopeBackwardArgs{backward, rotation}, scale));
    }
  });
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
  // What is read ahead, and written around the caches.
  for (const int64_t cols : {4096, 4100}) shapes.push_back({99, 1, cols, 0});
  shapes.push_back({3300, 33, 128, 0});
  // What is written before others are read.
  shapes.push_back({2100, 1, 128, 0});
  shapes.push_back({1400, 1, 200, 3});
  for (const Side side : {Side::begin, Side::end}) {
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
