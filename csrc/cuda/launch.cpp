// The operators on CUDA tensors, on the current stream. They use the device through torch's device-neutral interface,
// so that they compile against any build of torch.
#include "../tensor_args.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <functional>

#include "../backend.h"
#include "../operators.h"
#include "kernels.h"

namespace normops::cuda {
namespace {

using LaunchForward = void (*)(const KernelArgs& args, const Device& device, Stream stream);
using LaunchBackward = void (*)(const KernelArgs& args, const Device& device, Stream stream,
                                const AllocatePartials& allocate);

LaunchForward kernels_of(const RmsNorm&) { return launch_rms_norm; }
LaunchForward kernels_of(const RmsNormStats&) { return launch_rms_norm; }
LaunchForward kernels_of(const RmsNormFromStats&) { return launch_rms_norm; }
LaunchForward kernels_of(const AddRmsNorm&) { return launch_add_rms_norm; }
LaunchForward kernels_of(const GatedRmsNorm&) { return launch_gated_rms_norm; }
LaunchForward kernels_of(const RmsNormRope&) { return launch_rms_norm_rope; }
LaunchBackward kernels_of(const RmsNormBackward&) { return launch_rms_norm_backward; }
LaunchBackward kernels_of(const RmsNormBackwardStats&) { return launch_rms_norm_backward; }
LaunchBackward kernels_of(const RmsNormBackwardFromStats&) { return launch_rms_norm_backward; }
LaunchBackward kernels_of(const GatedRmsNormBackward&) { return launch_gated_rms_norm_backward; }
LaunchBackward kernels_of(const RmsNormRopeBackward&) { return launch_rms_norm_rope_backward; }

void run(LaunchForward launch, const TensorArgs& args, Stream stream) { launch(args, current_device(), stream); }

void run(LaunchBackward launch, const TensorArgs& args, Stream stream) {
  const Device device = current_device();
  const int64_t cols = args.weight.groups * args.cols;
  Tensor partials;
  const auto allocate = [&](int64_t count) {
    const auto compute = compute_dtype(args.dtype()) == DType::float64 ? at::kDouble : at::kFloat;
    partials = at::empty({count, cols}, args.tensor(kGradWeight).options().dtype(compute));
    return partials.mutable_data_ptr();
  };
  launch(args, device, stream, std::ref(allocate));
  if (!partials.defined()) return;
  const RowsArg& dw = args[kGradWeight];
  launch_grad_weight(args.dtype(), dw.dtype, partials.const_data_ptr(), partials.size(0), cols, dw.data, device,
                     stream);
}

// The Backend of BackendKernels.
struct CudaBackend {
  static bool supports(const RmsNorm&) { return true; }
  static bool supports(const RmsNormBackward& arguments) { return !arguments.uses_bias(); }  // ATen sums grad_output
  using Guard = c10::DeviceGuard;

  static Tensor empty_contiguous(const OutputSpec& like) { return at::empty(like.sizes(), like.options()); }

  template <class Operator>
  static void launch(const Operator& arguments, const OutputPtrs<Operator>& outputs) {
    const TensorArgs args(arguments, outputs);
    const c10::Device device = arguments.input.device();
    run(kernels_of(arguments), args, c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle());
    args.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { register_all<BackendKernels<CudaBackend>>(m, RowOperators()); }

}  // namespace normops::cuda
