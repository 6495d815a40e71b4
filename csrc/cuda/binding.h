// What the operators on CUDA tensors have in common. They reach the device through torch's device-neutral interface, so
// that they build against any build of torch.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include "../operator.h"
#include "../problem.h"
#include "rms_norm_launch.h"

namespace normops::cuda {

// What the operator templates need of a backend besides its launchers.
struct CudaBackend {
  using Guard = c10::DeviceGuard;
  static Tensor empty_contiguous(const Tensor& like) { return at::empty_like(like, at::MemoryFormat::Contiguous); }
};

inline Stream current_stream(const Tensor& tensor) {
  const c10::Device device = tensor.device();
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

// The tensor keeps the memory until the kernel is launched; after that the stream's order does.
inline Weight make_weight(const Tensor& contiguous, double weight_offset, int64_t groups) {
  if (!contiguous.defined()) return {nullptr, DType::float32, 0.0, groups};
  return {contiguous.const_data_ptr(), dtype_of(contiguous), weight_offset, groups};
}

inline Tensor contiguous_or_undefined(const OptionalTensor& weight) {
  return is_given(weight) ? weight->contiguous() : Tensor();
}

inline RmsNormArgs forward_args(const Problem& problem, const Rows& x, const Tensor& contiguous_weight,
                                double weight_offset, const Target& y) {
  return {
      .dtype = dtype_of(*x.tensor),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = make_weight(contiguous_weight, weight_offset, problem.groups),
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .output = y.data(),
      .output_rows = y.layout(),
  };
}

// Without what not every backward has, and without what it writes.
inline RmsNormBackwardArgs backward_args(const Problem& problem, const Rows& dy, const Rows& x,
                                         const Tensor& contiguous_weight, double weight_offset) {
  return {
      .dtype = dtype_of(*x.tensor),
      .grad_output_dtype = dtype_of(*dy.tensor),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = make_weight(contiguous_weight, weight_offset, problem.groups),
      .grad_output = dy.tensor->const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
  };
}

// Where a gradient is written, null if it is not wanted.
inline std::optional<Target> write_gradient(const Tensor& gradient, size_t normalized_dims, void*& data,
                                            RowLayout& layout) {
  if (!gradient.defined()) return std::nullopt;
  std::optional<Target> target(std::in_place, gradient, normalized_dims);
  data = target->data();
  layout = target->layout();
  return target;
}

// Calls launch() with args, which it tells where to write grad_weight's partial sums, so many of each group, and sums
// them, if grad_weight is wanted.
template <class Launch>
void launch_with_grad_weight(RmsNormBackwardArgs& args, int64_t count, const Tensor& grad_weight, Stream stream,
                             Launch launch) {
  if (!grad_weight.defined()) return launch();
  const auto compute = compute_dtype(args.dtype) == DType::float64 ? at::kDouble : at::kFloat;
  const int64_t cols = args.weight.groups * args.cols;
  const Tensor partials = at::empty({count, cols}, grad_weight.options().dtype(compute));
  args.grad_weight_partials = partials.mutable_data_ptr();
  launch();
  const Tensor dw = grad_weight.is_contiguous() ? grad_weight : CudaBackend::empty_contiguous(grad_weight);
  launch_grad_weight(args.dtype, dtype_of(dw), partials.const_data_ptr(), count, cols, dw.mutable_data_ptr(), stream);
  if (!dw.is_same(grad_weight)) grad_weight.copy_(dw);
}

}  // namespace normops::cuda
