#include "../gated_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "composite.h"
#include "kernels.h"

namespace normops {

Tensor activate(const Tensor& gate, Activation activation) {
  return activation == Activation::silu ? at::silu(gate) : at::sigmoid(gate);
}

Tensor activation_slope(const Tensor& gate, Activation activation) {
  const Tensor s = at::sigmoid(gate), c = at::sigmoid(-gate);  // 1 - s, without cancellation
  return activation == Activation::silu ? s + gate * s * c : s * c;
}

Tensor activation_curvature(const Tensor& gate, Activation activation) {
  const Tensor s = at::sigmoid(gate), c = at::sigmoid(-gate);
  return s * c * (activation == Activation::silu ? 2 + gate * (c - s) : c - s);
}

Tensor composite(const GatedRmsNorm& arguments) {
  const auto& [input, gate, norm, activation, norm_before_gate] = arguments;
  const at::ScalarType dtype = input.scalar_type();
  const Tensor x = to_compute_dtype(input, input);
  const Tensor a = activate(to_compute_dtype(gate, input), arguments.gating().activation);
  if (!norm_before_gate) return normalize(x * a, norm, dtype).to(dtype);
  return (round_to(normalize(x, norm, dtype), dtype, norm.parsed_rounding().multiplied) * a).to(dtype);
}

std::tuple<Tensor, Tensor, Tensor> composite(const GatedRmsNormBackward& arguments) {
  const auto& [grad_output, input, gate, norm, activation, norm_before_gate, output_mask] = arguments;
  const Activation kind = arguments.gating().activation;
  const at::ScalarType dtype = input.scalar_type();
  const auto cast = [&, rounding = norm.parsed_rounding()](const Tensor& tensor) {
    return round_to(tensor, dtype, rounding.multiplied);
  };
  const Tensor dy = to_compute_dtype(grad_output, input), x = to_compute_dtype(input, input);
  const Tensor g = to_compute_dtype(gate, input);
  const Tensor a = activate(g, kind);
  const Tensor slope = output_mask[1] ? activation_slope(g, kind) : Tensor();
  const auto norm_backward = [&](const Tensor& dy, const Tensor& h, bool wants_h) {
    return normalize_backward(dy, h, norm, dtype, {wants_h, output_mask[2]});
  };

  Tensor grad_input, grad_gate, grad_weight;
  if (norm_before_gate) {
    std::tie(grad_input, grad_weight) = norm_backward(cast(dy * a), x, output_mask[0]);
    if (output_mask[1]) grad_gate = dy * cast(normalize(x, norm, dtype)) * slope;
  } else {
    Tensor grad_product;
    std::tie(grad_product, grad_weight) = norm_backward(dy, x * a, output_mask[0] || output_mask[1]);
    if (output_mask[0]) grad_input = grad_product * a;
    if (output_mask[1]) grad_gate = grad_product * x * slope;
  }
  if (output_mask[0]) grad_input = grad_input.to(dtype);
  if (output_mask[1]) grad_gate = grad_gate.to(gate.scalar_type());
  return {grad_input, grad_gate, grad_weight};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  register_all<Composite>(m, List<GatedRmsNorm, GatedRmsNormBackward>());
}

}  // namespace normops
