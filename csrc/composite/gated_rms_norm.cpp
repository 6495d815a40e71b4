#include "gated_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>

#include "rms_norm.h"

namespace normops {
namespace {

Tensor contiguous_if_defined(const Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

Tensor gated_rms_norm_fallback(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                               std::string_view activation, bool norm_before_gate) {
  return gated_rms_norm_composite(input, gate, normalized_shape, weight, eps, weight_offset, activation,
                                  norm_before_gate)
      .contiguous();
}

Tensor& gated_rms_norm_out_fallback(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                    const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                    std::string_view activation, bool norm_before_gate, Tensor& out) {
  check_gated_rms_norm_out(input, gate, normalized_shape, weight, eps, activation, norm_before_gate, out);
  return out.copy_(gated_rms_norm_composite(input, gate, normalized_shape, weight, eps, weight_offset, activation,
                                            norm_before_gate));
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward_fallback(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
    bool norm_before_gate, GatedOutputMask output_mask) {
  const auto [grad_input, grad_gate, grad_weight] =
      gated_rms_norm_backward_composite(grad_output, input, gate, normalized_shape, weight, eps, weight_offset,
                                        activation, norm_before_gate, output_mask);
  return {contiguous_if_defined(grad_input), contiguous_if_defined(grad_gate), contiguous_if_defined(grad_weight)};
}

std::tuple<Tensor&, Tensor&, Tensor&> gated_rms_norm_backward_out_fallback(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
    bool norm_before_gate, GatedOutputMask output_mask, Tensor& grad_input, Tensor& grad_gate, Tensor& grad_weight) {
  check_gated_rms_norm_backward_out(grad_output, input, gate, normalized_shape, weight, eps, activation,
                                    norm_before_gate, output_mask, grad_input, grad_gate, grad_weight);
  const auto [dx, dg, dw] = gated_rms_norm_backward_composite(grad_output, input, gate, normalized_shape, weight, eps,
                                                              weight_offset, activation, norm_before_gate, output_mask);
  if (dx.defined()) grad_input.copy_(dx);
  if (dg.defined()) grad_gate.copy_(dg);
  if (dw.defined()) grad_weight.copy_(dw);
  return {grad_input, grad_gate, grad_weight};
}

}  // namespace

Tensor activate(const Tensor& gate, Activation activation) {
  const Tensor s = at::sigmoid(gate);
  return activation == Activation::silu ? gate * s : s;
}

// With s the sigmoid and c = 1 - s, computed without cancellation: s' = s c and c' = -s c.
Tensor activation_slope(const Tensor& gate, Activation activation) {
  const Tensor s = at::sigmoid(gate), c = at::sigmoid(-gate);
  return activation == Activation::silu ? s + gate * s * c : s * c;
}

Tensor activation_curvature(const Tensor& gate, Activation activation) {
  const Tensor s = at::sigmoid(gate), c = at::sigmoid(-gate);
  return s * c * (activation == Activation::silu ? 2 + gate * (c - s) : c - s);
}

Tensor gated_rms_norm_composite(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                std::string_view activation, bool norm_before_gate) {
  const Gating gating = check_gated_rms_norm(input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
  const Tensor x = to_compute_dtype(input, input);
  const Tensor a = activate(to_compute_dtype(gate, input), gating.activation);
  const auto norm = [&](const Tensor& h) {
    return rms_norm_composite(h, normalized_shape, weight, eps, weight_offset);
  };
  const Tensor output = norm_before_gate ? norm(x) * a : norm(x * a);
  return output.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward_composite(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
    bool norm_before_gate, GatedOutputMask output_mask) {
  const Gating gating = check_gated_rms_norm_backward(grad_output, input, gate, normalized_shape, weight, eps,
                                                      activation, norm_before_gate);
  const Tensor dy = to_compute_dtype(grad_output, input), x = to_compute_dtype(input, input);
  const Tensor g = to_compute_dtype(gate, input);
  const Tensor a = activate(g, gating.activation);
  const Tensor slope = output_mask[1] ? activation_slope(g, gating.activation) : Tensor();
  const auto norm_backward = [&](const Tensor& dy, const Tensor& h, bool wants_h) {
    return rms_norm_backward_composite(dy, h, normalized_shape, weight, eps, weight_offset, std::nullopt,
                                       {wants_h, output_mask[2]});
  };

  Tensor grad_input, grad_gate, grad_weight;
  if (norm_before_gate) {
    std::tie(grad_input, grad_weight) = norm_backward(dy * a, x, output_mask[0]);
    if (output_mask[1]) {
      grad_gate = dy * rms_norm_composite(x, normalized_shape, weight, eps, weight_offset) * slope;
    }
  } else {
    Tensor grad_product;
    std::tie(grad_product, grad_weight) = norm_backward(dy, x * a, output_mask[0] || output_mask[1]);
    if (output_mask[0]) grad_input = grad_product * a;
    if (output_mask[1]) grad_gate = grad_product * x * slope;
  }
  if (output_mask[0]) grad_input = grad_input.to(input.scalar_type());
  if (output_mask[1]) grad_gate = grad_gate.to(gate.scalar_type());
  return {grad_input, grad_gate, grad_weight};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  m.impl("gated_rms_norm", gated_rms_norm_fallback);
  m.impl("gated_rms_norm.out", gated_rms_norm_out_fallback);
  m.impl("gated_rms_norm_backward", gated_rms_norm_backward_fallback);
  m.impl("gated_rms_norm_backward.out", gated_rms_norm_backward_out_fallback);
}

}  // namespace normops
