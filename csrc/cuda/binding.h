// What the operators on CUDA tensors have in common. They reach the device through torch's device-neutral interface, so
// that they build against any build of torch.
#pragma once
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../launch.h"
#include "rms_norm_launch.h"

namespace normops::cuda {

// What the operator templates need of a backend besides its launchers.
struct CudaBackend {
  using Guard = c10::DeviceGuard;
  static Tensor empty_contiguous(const OutputLike& like) { return at::empty(like.sizes(), like.options()); }
};

inline Stream current_stream(const Tensor& tensor) {
  const c10::Device device = tensor.device();
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

inline Tensor contiguous_or_undefined(const OptionalTensor& weight) {
  return is_given(weight) ? weight->contiguous() : Tensor();
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
  const Tensor dw = grad_weight.is_contiguous() ? grad_weight : CudaBackend::empty_contiguous(&grad_weight);
  launch_grad_weight(args.dtype, dtype_of(dw), partials.const_data_ptr(), count, cols, dw.mutable_data_ptr(), stream);
  if (!dw.is_same(grad_weight)) grad_weight.copy_(dw);
}

}  // namespace normops::cuda
