// The derivatives of rms_norm and rms_norm_backward. Nothing is saved but the arguments; rms_norm_backward recomputes
// rstd.
#include "../rms_norm.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "../composite/rms_norm.h"
#include "../problem.h"
#include "rms_norm.h"
#include "write.h"

namespace normops {
namespace {

using torch::autograd::compute_requires_grad;

// The derivative of rms_norm is the operator rms_norm_backward.
struct RmsNormGradient {
  static constexpr const char* kName = "RmsNormBackward";
  static constexpr size_t kSaved = 2, kSavedOutputs = 0, kInputs = 2;  // input, weight
  using Attributes = NormAttributes;

  static variable_list backward(const variable_list& grad_outputs, const variable_list& saved,
                                const Attributes& attributes, const std::array<bool, kInputs>& needed) {
    if (!grad_outputs[0].defined() || (!needed[0] && !needed[1])) return variable_list(kInputs);
    const auto& [normalized_dims, eps, weight_offset] = attributes;
    const Tensor &input = saved[0], &weight = saved[1];
    auto [grad_input, grad_weight] =
        rms_norm_backward_op().call(grad_outputs[0], input, last_sizes(input, normalized_dims), if_defined(weight), eps,
                                    weight_offset, std::nullopt, needed);
    return {std::move(grad_input), std::move(grad_weight)};
  }
};

struct RmsNormBackwardGradient {
  static constexpr const char* kName = "RmsNormBackwardBackward";
  static constexpr size_t kSaved = 3, kSavedOutputs = 0, kInputs = kRmsNormBackwardInputs;
  using Attributes = NormAttributes;
  static constexpr auto backward = rms_norm_backward_backward;
};

Tensor rms_norm_autograd(c10::DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                         const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
  check_rms_norm_devices("rms_norm", input, weight);
  const Tensor& given_weight = value_or_undefined(weight);
  if (has_tangent(input, given_weight)) {
    return rms_norm_composite(input, normalized_shape, weight, eps, weight_offset);
  }
  const bool requires_grad = compute_requires_grad(input, given_weight);
  const auto node = requires_grad ? make_node<OperatorNode<RmsNormGradient>>() : nullptr;
  if (requires_grad) {
    node->connect(input, given_weight);
    // Before the operator runs: a checkpoint stops recomputing once everything is saved.
    node->save(make_attributes(normalized_shape, eps, weight_offset), input, given_weight);
  }
  Tensor output = redispatch(rms_norm_op(), keys, input, normalized_shape, weight, eps, weight_offset);
  if (requires_grad) torch::autograd::set_history(output, node);
  return output;
}

Tensor& rms_norm_inplace_autograd(c10::DispatchKeySet keys, Tensor& input, c10::SymIntArrayRef normalized_shape,
                                  const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
  check_rms_norm_devices("rms_norm_", input, weight);
  check_no_grad("rms_norm_", input, value_or_undefined(weight));
  redispatch(rms_norm_inplace_op(), keys, input, normalized_shape, weight, eps, weight_offset);
  return input;
}

Tensor& rms_norm_out_autograd(c10::DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                              const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                              Tensor& out) {
  check_rms_norm_devices("rms_norm", input, weight);
  check_no_grad("rms_norm", input, value_or_undefined(weight), out);
  redispatch(rms_norm_out_op(), keys, input, normalized_shape, weight, eps, weight_offset, out);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_output,
                                                      const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                                      const OptionalTensor& weight, std::optional<double> eps,
                                                      double weight_offset, const OptionalTensor& grad_residual,
                                                      OutputMask output_mask) {
  check_rms_norm_backward_devices(grad_output, input, weight, grad_residual);
  const Tensor &given_weight = value_or_undefined(weight), &given_residual = value_or_undefined(grad_residual);
  if (has_tangent(grad_output, input, given_weight, given_residual)) {
    return rms_norm_backward_composite(grad_output, input, normalized_shape, weight, eps, weight_offset, grad_residual,
                                       output_mask);
  }
  auto [grad_input, grad_weight] = redispatch(rms_norm_backward_op(), keys, grad_output, input, normalized_shape,
                                              weight, eps, weight_offset, grad_residual, output_mask);
  if (compute_requires_grad(grad_output, input, given_weight, given_residual)) {
    auto node = make_node<OperatorNode<RmsNormBackwardGradient>>();
    node->connect(grad_output, input, given_weight, given_residual);
    node->save(make_attributes(normalized_shape, eps, weight_offset), grad_output, input, given_weight);
    torch::autograd::set_history(grad_input, node);
    torch::autograd::set_history(grad_weight, node);
  }
  return {std::move(grad_input), std::move(grad_weight)};
}

std::tuple<Tensor&, Tensor&> rms_norm_backward_out_autograd(c10::DispatchKeySet keys, const Tensor& grad_output,
                                                            const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, std::optional<double> eps,
                                                            double weight_offset, const OptionalTensor& grad_residual,
                                                            OutputMask output_mask, Tensor& grad_input,
                                                            Tensor& grad_weight) {
  check_rms_norm_backward_devices(grad_output, input, weight, grad_residual);
  check_no_grad("rms_norm_backward", grad_output, input, value_or_undefined(weight), value_or_undefined(grad_residual),
                grad_input, grad_weight);
  redispatch(rms_norm_backward_out_op(), keys, grad_output, input, normalized_shape, weight, eps, weight_offset,
             grad_residual, output_mask, grad_input, grad_weight);
  return {grad_input, grad_weight};
}

}  // namespace

variable_list rms_norm_backward_backward(const variable_list& grad_outputs, const variable_list& saved,
                                         const NormAttributes& attributes,
                                         const std::array<bool, kRmsNormBackwardInputs>& needed) {
  variable_list result(kRmsNormBackwardInputs);
  if (!grad_outputs[0].defined() && !grad_outputs[1].defined()) return result;
  const auto& [normalized_dims, eps, weight_offset] = attributes;
  const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
  const auto mean = [dims = normalized_dims](const Tensor& tensor) { return mean_of_rows(tensor, dims); };

  const Tensor dy = to_compute_dtype(grad_output, input), h = to_compute_dtype(input, input);
  const Tensor r = rstd_of_rows(h, normalized_dims, resolve_eps(eps, input.scalar_type()));
  const Tensor w = weight.defined() ? to_compute_dtype(weight, input) + weight_offset : Tensor();
  Tensor for_grad_output, for_input, for_weight;

  if (grad_outputs[0].defined()) {
    const Tensor u = to_compute_dtype(grad_outputs[0], input);
    const Tensor r2 = r * r;
    const Tensor projected =
        r * (u - r2 * h * mean(u * h));  // what g receives: the map from g to grad_input is symmetric
    const Tensor g = w.defined() ? dy * w : dy;
    const Tensor gh = mean(g * h), uh = mean(u * h), ug = mean(u * g);
    for_grad_output = w.defined() ? projected * w : projected;
    for_input = -(r2 * r) * (h * (ug - 3 * r2 * gh * uh) + u * gh + g * uh);
    if (weight.defined() && needed[2]) for_weight = sum_over_rows(dy * projected, weight);
    if (needed[3]) result[3] = grad_outputs[0];
  }
  if (grad_outputs[1].defined()) {
    const Tensor v = to_compute_dtype(grad_outputs[1], input);
    const Tensor through_weight = v * h * r;
    const Tensor through_rstd = r * (v * dy - r * r * h * mean(v * dy * h));
    for_grad_output = for_grad_output.defined() ? for_grad_output + through_weight : through_weight;
    for_input = for_input.defined() ? for_input + through_rstd : through_rstd;
  }
  if (needed[0]) result[0] = for_grad_output.to(grad_output.scalar_type());
  if (needed[1]) result[1] = for_input.to(input.scalar_type());
  if (for_weight.defined()) result[2] = for_weight.to(weight.scalar_type());
  return result;
}

TORCH_LIBRARY_IMPL(normops, ADInplaceOrView, m) {
  m.impl("rms_norm.out", CountedWrite<rms_norm_out_op, RmsNormOut>::call);
  m.impl("rms_norm_", CountedWrite<rms_norm_inplace_op, RmsNormInplace>::call);
  m.impl("rms_norm_backward.out", CountedWrite<rms_norm_backward_out_op, RmsNormBackwardOut>::call);
}

TORCH_LIBRARY_IMPL(normops, Autograd, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("rms_norm.out", rms_norm_out_autograd);
  m.impl("rms_norm_", rms_norm_inplace_autograd);
  m.impl("rms_norm_backward", rms_norm_backward_autograd);
  m.impl("rms_norm_backward.out", rms_norm_backward_out_autograd);
}

}  // namespace normops
