// The derivatives of gated_rms_norm and gated_rms_norm_backward. Nothing is saved but the arguments.
#include "../gated_rms_norm.h"

#include <ATen/TensorOperators.h>

#include "../composite/composite.h"
#include "../rms_norm.h"
#include "kernels.h"

namespace normops {

template <>
struct Derivative<GatedRmsNorm> {
  static constexpr const char* kName = "GatedRmsNormBackward";
  static constexpr Uses<3, 3> kNeededForGrad = {{
      // depends on: input, gate, weight
      {true, true, true},   // input
      {true, true, true},   // gate
      {true, true, false},  // weight
  }};
  static Tensor output(const GatedRmsNorm& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const GatedRmsNorm& saved, const Needed<3>& needed) {
    const auto& [input, gate, norm, activation, norm_before_gate] = saved;
    return to_list(
        call(GatedRmsNormBackward{grad_outputs[0], input, gate, norm, activation, norm_before_gate, needed}));
  }
};

template <>
struct Derivative<GatedRmsNormBackward> {
  static constexpr const char* kName = "GatedRmsNormBackwardBackward";
  // The tangent of a product is the sum of two, with the tangents of the norm and of the activation. Each of them
  // contributes to every gradient. With n the norm and a the activation, whose tangents are n_t and a_t,
  //     norm first: y = n a, and the gradients are those of the sum of dy (n_t a + n a_t)
  //     gate first: y = n(x a), and the tangent of x a is x_t a + x a_t
  static variable_list backward(const variable_list& grad_outputs, const GatedRmsNormBackward& saved,
                                const Needed<4>&) {
    const auto as_computed = [&](const Tensor& tensor) { return to_compute_dtype(tensor, saved.input); };
    const Tensor dy = as_computed(saved.grad_output), x = as_computed(saved.input), gate = as_computed(saved.gate);
    const OptionalTensor weight = if_defined(as_computed(value_or_undefined(saved.norm.weight))), none;
    const Norm norm = {saved.norm.normalized_shape, weight, saved.norm.eps, saved.norm.weight_offset, kRoundOnce};
    const Tensor x_t = as_computed(grad_outputs[0]), gate_t = as_computed(grad_outputs[1]),
                 weight_t = as_computed(grad_outputs[2]);
    const Activation kind = saved.gating().activation;
    const Tensor a = activate(gate, kind), slope = activation_slope(gate, kind);
    const Tensor a_t = times(gate_t, slope);
    const Tensor slope_t = gate_t.defined() ? gate_t * activation_curvature(gate, kind) : gate_t;
    const auto backward_of_norm = [&](const Tensor& dy, const Tensor& h) {
      return call(RmsNormBackward{dy, h, norm, none, none, {true, weight.has_value(), false}});
    };

    if (saved.norm_before_gate) {
      auto [n_t, of_x, of_weight] = normalize_backward_backward(x_t, weight_t, dy * a, x, norm);
      Tensor of_dy = times(n_t, a), of_gate = times(n_t, dy * slope);
      if (gate_t.defined()) {
        const Tensor n = call(RmsNorm{x, norm, none})[0];
        of_dy = plus(of_dy, n * a_t);
        of_gate = plus(of_gate, dy * n * slope_t);
        const auto [through_x, through_weight, _] = backward_of_norm(dy * a_t, x);
        of_x = plus(of_x, through_x), of_weight = plus(of_weight, through_weight);
      }
      return {of_dy, of_x, of_gate, of_weight};
    }
    const Tensor product_t = plus(times(x_t, a), times(a_t, x));
    const auto [of_dy, of_product, of_weight] = normalize_backward_backward(product_t, weight_t, dy, x * a, norm);
    Tensor of_x = of_product * a, of_gate = of_product * x * slope;
    if (product_t.defined()) {
      const Tensor grad_product = backward_of_norm(dy, x * a)[0];
      of_x = plus(of_x, times(a_t, grad_product));
      of_gate = plus(of_gate, grad_product * plus(times(x_t, slope), times(slope_t, x)));
    }
    return {of_dy, of_x, of_gate, of_weight};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<GatedRmsNorm, GatedRmsNormBackward>()); }

}  // namespace normops
