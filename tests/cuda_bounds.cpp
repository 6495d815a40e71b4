// Runs the CUDA kernels by cuda_emulation.h on buffers of exactly the bytes that they may access, for the sanitizers.
#include <cstdio>
#include <vector>

#include "add_rms_norm.cu"
#include "gated_rms_norm.cu"
#include "gated_rms_norm_backward.cu"
#include "rms_norm.cu"
#include "rms_norm_backward.cu"

namespace {

using namespace normops;
using namespace normops::cuda;

constexpr DType kDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

// Rows of `stride` elements, the last one no longer than it must be, `offset` elements away from an aligned address.
class Buffer {
 public:
  Buffer(DType dtype, int64_t rows, int64_t cols, int64_t stride, int64_t offset)
      : offset_(offset * size_of(dtype)), bytes_(offset_ + ((rows - 1) * stride + cols) * size_of(dtype), 0x3c) {
    layout.dims = 1;
    layout.sizes[0] = rows;
    layout.strides[0] = stride;
  }
  void* data() { return bytes_.data() + offset_; }

  RowLayout layout;

 private:
  size_t offset_;
  std::vector<char> bytes_;
};

// With a residual of `residual_dtype`, which is also the dtype of the backward's input, and a gate of it.
void run(DType dtype, DType residual_dtype, DType weight_dtype, int64_t rows, int64_t cols, int64_t padding,
         int64_t offset, const Device& device, int64_t groups = 1) {
  const auto rows_buffer = [&](DType dtype) { return Buffer(dtype, rows, cols, cols + padding, offset); };
  Buffer grad_output = rows_buffer(dtype), input = rows_buffer(dtype), residual = rows_buffer(residual_dtype),
         grad_residual = rows_buffer(residual_dtype), output = rows_buffer(dtype),
         residual_out = rows_buffer(residual_dtype), grad_input = rows_buffer(residual_dtype),
         weight(weight_dtype, groups, cols, cols, offset), grad_weight(weight_dtype, groups, cols, cols, 0);
  const Weight w = {weight.data(), weight_dtype, 1, groups};
  const int64_t count = rms_norm_backward_partials(residual_dtype, dtype, rows, cols, groups, device);
  Buffer partials(compute_dtype(dtype), count * groups, cols, cols, 0);

  const RmsNormArgs forward = {.dtype = dtype,
                               .rows = rows,
                               .cols = cols,
                               .eps = 1e-5,
                               .weight = w,
                               .input = input.data(),
                               .input_rows = input.layout,
                               .output = output.data(),
                               .output_rows = output.layout};
  launch_rms_norm(forward, device, nullptr);
  launch_add_rms_norm(
      {forward, residual_dtype, residual.data(), residual.layout, residual_out.data(), residual_out.layout}, device,
      nullptr);
  launch_rms_norm_backward({.dtype = residual_dtype,
                            .grad_output_dtype = dtype,
                            .rows = rows,
                            .cols = cols,
                            .eps = 1e-5,
                            .weight = w,
                            .grad_output = grad_output.data(),
                            .grad_output_rows = grad_output.layout,
                            .input = residual.data(),
                            .input_rows = residual.layout,
                            .grad_residual = grad_residual.data(),
                            .grad_residual_rows = grad_residual.layout,
                            .grad_input = grad_input.data(),
                            .grad_input_rows = grad_input.layout,
                            .grad_weight_partials = partials.data()},
                           device, nullptr);
  Buffer gated_gradient = rows_buffer(dtype);
  const int64_t gated_count = gated_rms_norm_backward_partials(dtype, rows, cols, groups, device);
  Buffer gated_partials(compute_dtype(dtype), gated_count * groups, cols, cols, 0);
  for (const bool norm_before_gate : {true, false}) {
    const Gating gating = {Activation::silu, norm_before_gate};
    launch_gated_rms_norm({forward, gating, residual_dtype, residual.data(), residual.layout}, device, nullptr);
    launch_gated_rms_norm_backward({{.dtype = dtype,
                                     .grad_output_dtype = dtype,
                                     .rows = rows,
                                     .cols = cols,
                                     .eps = 1e-5,
                                     .weight = w,
                                     .grad_output = grad_output.data(),
                                     .grad_output_rows = grad_output.layout,
                                     .input = input.data(),
                                     .input_rows = input.layout,
                                     .grad_input = gated_gradient.data(),
                                     .grad_input_rows = gated_gradient.layout,
                                     .grad_weight_partials = gated_partials.data()},
                                    gating,
                                    residual_dtype,
                                    residual.data(),
                                    residual.layout,
                                    grad_input.data(),
                                    grad_input.layout},
                                   device, nullptr);
  }
  // Its blocks differ in nothing but the columns; many of them would take long.
  if (cols < 200) {
    launch_grad_weight(dtype, weight_dtype, partials.data(), count, groups * cols, grad_weight.data(), nullptr);
  }
}

}  // namespace

int main() {
  const Device with_shared = {1, 227 << 10, 1}, without_shared = {1, 0, 1}, with_clusters = {1, 227 << 10, 8};
  const auto run_all = [&](DType dtype, DType residual_dtype) {
    const int64_t pack = 16 / size_of(residual_dtype);
    for (const DType weight_dtype : kDTypes) {
      for (const int64_t cols : {1, 5, 63, 64, 65, 100, 769}) {
        run(dtype, residual_dtype, weight_dtype, 5, cols, 0, 0, with_shared);
        run(dtype, residual_dtype, weight_dtype, 6, cols, 0, 0, with_shared, 3);
      }
    }
    for (const int64_t packs : {64, 512, 2048, 4096, 4097}) {
      run(dtype, residual_dtype, dtype, 2, packs * pack, 0, 0, with_shared);
      run(dtype, residual_dtype, dtype, 2, packs * pack, 1, 1, with_shared);
      run(dtype, residual_dtype, dtype, 2, packs * pack - 1, pack + 1, 0, without_shared);
    }
    run(dtype, residual_dtype, dtype, 300, 8 * pack, 0, 0, with_shared);
    for (const int64_t packs : {8, 64, 512, 4097}) {
      run(dtype, residual_dtype, residual_dtype, 4, packs * pack, 0, 0, with_shared, 2);
    }
    run(dtype, residual_dtype, dtype, 1, 2049 * pack, 0, 0, with_clusters);
  };
  for (const DType dtype : kDTypes) {
    run_all(dtype, dtype);
    if (size_of(dtype) == 2) run_all(dtype, DType::float32);
  }
}
