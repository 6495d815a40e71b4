// gated_rms_norm and gated_rms_norm_backward on CUDA tensors.
#include "../gated_rms_norm_backend.h"

#include "binding.h"
#include "gated_rms_norm_launch.h"

namespace normops::cuda {
namespace {

void run_gated_rms_norm(const Tensor& input, const Tensor& gate, size_t normalized_dims, const OptionalTensor& weight,
                        std::optional<double> eps, double weight_offset, Gating gating, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims), g = make_rows(gate, normalized_dims);
  const Target y(output, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  const GatedRmsNormArgs args = {forward_args(problem, x, w, weight_offset, y), gating, dtype_of(gate),
                                 g.tensor->const_data_ptr(), g.layout};
  launch_gated_rms_norm(args, current_device(), current_stream(input));
  y.finish();
}

void run_gated_rms_norm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                 size_t normalized_dims, const OptionalTensor& weight, std::optional<double> eps,
                                 double weight_offset, Gating gating, const Tensor& grad_input, const Tensor& grad_gate,
                                 const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Device device = current_device();
  const Stream stream = current_stream(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims), g = make_rows(gate, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  GatedRmsNormBackwardArgs args = {backward_args(problem, dy, x, w, weight_offset), gating, dtype_of(gate),
                                   g.tensor->const_data_ptr(), g.layout};
  const auto dx = write_gradient(grad_input, normalized_dims, args.grad_input, args.grad_input_rows);
  const auto dg = write_gradient(grad_gate, normalized_dims, args.grad_gate, args.grad_gate_rows);
  const int64_t count =
      gated_rms_norm_backward_partials(args.dtype, problem.rows, problem.cols, problem.groups, device);
  launch_with_grad_weight(args, count, grad_weight, stream,
                          [&] { launch_gated_rms_norm_backward(args, device, stream); });
  if (dx.has_value()) dx->finish();
  if (dg.has_value()) dg->finish();
}

struct Backend : CudaBackend {
  static constexpr auto launch = run_gated_rms_norm;
  static constexpr auto launch_backward = run_gated_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { GatedRmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cuda
