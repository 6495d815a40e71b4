// gated_rms_norm and gated_rms_norm_backward on CPU tensors.
#include "../gated_rms_norm_backend.h"

#include "gated_rms_norm_kernel.h"
#include "launch.h"
#include "launch_backward.h"

namespace normops::cpu {
namespace {

RowLayout in_bytes(RowLayout layout, const Tensor& tensor) {
  for (int d = 0; d < layout.dims; d++) layout.strides[d] *= static_cast<int64_t>(tensor.element_size());
  return layout;
}

void launch_gated_rms_norm(const Tensor& input, const Tensor& gate, size_t normalized_dims,
                           const OptionalTensor& weight, std::optional<double> eps, double weight_offset, Gating gating,
                           const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims), g = make_rows(gate, normalized_dims);
  const Target y(output, normalized_dims);
  const Scale scale(weight, weight_offset, dtype_of(input), problem);
  const GatedRmsNormArgs args = {forward_args(problem, x, y), gating, dtype_of(gate), g.tensor->const_data_ptr(),
                                 in_bytes(g.layout, gate)};
  run_forward(gated_rms_norm_kernels(), args, scale, problem.rows);
  y.finish();
}

void launch_gated_rms_norm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                    size_t normalized_dims, const OptionalTensor& weight, std::optional<double> eps,
                                    double weight_offset, Gating gating, const Tensor& grad_input,
                                    const Tensor& grad_gate, const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const DType dtype = dtype_of(input);
  const Rows dy = make_rows(grad_output, normalized_dims), x = make_rows(input, normalized_dims),
             g = make_rows(gate, normalized_dims);
  const Scale scale(weight, weight_offset, dtype, problem);
  GatedRmsNormBackwardArgs args = {backward_args(problem, dy, x), gating, dtype_of(gate), g.tensor->const_data_ptr(),
                                   in_bytes(g.layout, gate)};
  args.stream = exceeds_caches(input, 5);
  std::optional<Target> dx, dg;
  if (grad_input.defined()) {
    dx.emplace(grad_input, normalized_dims);
    args.grad_input = dx->data();
    args.grad_input_rows = dx->layout();
  }
  if (grad_gate.defined()) {
    dg.emplace(grad_gate, normalized_dims);
    args.grad_gate = dg->data();
    args.grad_gate_rows_in_bytes = in_bytes(dg->layout(), gate);
  }
  PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight,
                       {&grad_output, &input, &gate, &value_or_undefined(weight)});
  args.grad_weight_partials = partials.data();
  run_backward(gated_rms_norm_backward_kernels(), args, scale);
  if (dx.has_value()) dx->finish();
  if (dg.has_value()) dg->finish();
  partials.finish();
}

struct Backend : CpuBackend {
  static constexpr auto launch = launch_gated_rms_norm;
  static constexpr auto launch_backward = launch_gated_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { GatedRmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cpu
