// gated_rms_norm and gated_rms_norm_backward on CUDA tensors.
#include "../gated_rms_norm.h"
#include "../backend.h"
#include "binding.h"
#include "gated_rms_norm_launch.h"

namespace normops::cuda {
namespace {

struct Backend : CudaBackend {
  static void launch(const GatedRmsNorm& arguments, const Tensor& output) {
    const auto& [input, gate, norm, activation, norm_before_gate] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), g = make_rows(gate, norm.dims());
    const Target y(output, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    const GatedRmsNormArgs args = {forward_args(problem, x, w, norm.weight_offset, y), arguments.gating(),
                                   dtype_of(gate), g.tensor->const_data_ptr(), g.layout};
    launch_gated_rms_norm(args, current_device(), current_stream(input));
    y.finish();
  }

  static void launch(const GatedRmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_gate,
                     const Tensor& grad_weight) {
    const auto& [grad_output, input, gate, norm, activation, norm_before_gate, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const Device device = current_device();
    const Stream stream = current_stream(input);
    const Rows dy = make_rows(grad_output, norm.dims());
    const Rows x = make_rows(input, norm.dims()), g = make_rows(gate, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    GatedRmsNormBackwardArgs args = {backward_args(problem, dy, x, w, norm.weight_offset), arguments.gating(),
                                     dtype_of(gate), g.tensor->const_data_ptr(), g.layout};
    const auto dx = write_gradient(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    const auto dg = write_gradient(grad_gate, norm.dims(), args.grad_gate, args.grad_gate_rows);
    const int64_t count =
        gated_rms_norm_backward_partials(args.dtype, problem.rows, problem.cols, problem.groups, device);
    launch_with_grad_weight(args, count, grad_weight, stream,
                            [&] { launch_gated_rms_norm_backward(args, device, stream); });
    if (dx.has_value()) dx->finish();
    if (dg.has_value()) dg->finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) {
  register_all<BackendKernels<Backend>>(m, List<GatedRmsNorm, GatedRmsNormBackward>());
}

}  // namespace normops::cuda
