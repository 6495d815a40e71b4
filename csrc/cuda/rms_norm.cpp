// rms_norm and rms_norm_backward on CUDA tensors: lays the problem out for the kernels and launches them on the current
// stream.
#include "../rms_norm.h"
#include "../backend.h"
#include "binding.h"

namespace normops::cuda {
namespace {

struct Backend : CudaBackend {
  static void launch(const RmsNorm& arguments, const Tensor& output) {
    const auto& [input, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims());
    const Target y(output, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    launch_rms_norm(forward_args(problem, x, w, norm.weight_offset, y), current_device(), current_stream(input));
    y.finish();
  }

  // grad_input and grad_weight may be undefined: then they are not wanted.
  static void launch(const RmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const Device device = current_device();
    const Stream stream = current_stream(input);
    const Rows dy = make_rows(grad_output, norm.dims());
    const Rows x = make_rows(input, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    RmsNormBackwardArgs args = backward_args(problem, dy, x, w, norm.weight_offset);
    Rows residual;
    if (is_given(grad_residual)) {
      residual = make_rows(*grad_residual, norm.dims());
      args.grad_residual = residual.tensor->const_data_ptr();
      args.grad_residual_rows = residual.layout;
    }
    const auto dx = write_gradient(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    const int64_t count = rms_norm_backward_partials(args.dtype, args.grad_output_dtype, problem.rows, problem.cols,
                                                     problem.groups, device);
    launch_with_grad_weight(args, count, grad_weight, stream, [&] { launch_rms_norm_backward(args, device, stream); });
    if (dx.has_value()) dx->finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { register_all<BackendKernels<Backend>>(m, List<RmsNorm, RmsNormBackward>()); }

}  // namespace normops::cuda
