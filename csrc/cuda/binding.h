// What the operators on CUDA tensors have in common. They reach the device through torch's device-neutral interface, so
// that they build against any build of torch.
#pragma once
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include "../check.h"
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

}  // namespace normops::cuda
