// The derivatives of gated_rms_norm and gated_rms_norm_backward. Nothing is saved but the arguments.
#include "../gated_rms_norm.h"

#include <ATen/TensorOperators.h>

#include "../composite/gated_rms_norm.h"
#include "../composite/rms_norm.h"
#include "rms_norm.h"

namespace normops {

template <>
struct Derivative<GatedRmsNorm> {
  static constexpr const char* kName = "GatedRmsNormBackward";
  static constexpr Uses<3, 3> kUses = {{
      // by input, gate, weight
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

static Tensor sum_of_defined(const Tensor& a, const Tensor& b) { return !a.defined() ? b : b.defined() ? a + b : a; }

// The derivative of gated_rms_norm_backward, with respect to (grad_output, input, gate, weight), by the chain rule: it
// is rms_norm_backward between products with the activation a, its slope a' and its curvature a''; docs/derivation.md.
//     norm first: (grad_input, grad_weight) = rms_norm_backward(dy a, x),  grad_gate = dy rms_norm(x) a'
//     gate first: (du, grad_weight) = rms_norm_backward(dy, x a),          grad_input = du a,  grad_gate = du x a'
// u, v and z are the incoming gradients of grad_input, grad_weight and grad_gate.
template <>
struct Derivative<GatedRmsNormBackward> {
  static constexpr const char* kName = "GatedRmsNormBackwardBackward";
  static constexpr Uses<4, 4> kUses = {{
      // by grad_output, input, gate, weight
      {false, true, true, true},  // grad_output
      {true, true, true, true},   // input
      {true, true, true, true},   // gate
      {true, true, true, false},  // weight
  }};
  static variable_list backward(const variable_list& grad_outputs, const GatedRmsNormBackward& saved,
                                const Needed<4>& needed) {
    const Tensor& input = saved.input;
    const auto computed = [&](const Tensor& tensor) {
      return tensor.defined() ? to_compute_dtype(tensor, input) : Tensor();
    };
    const Tensor dy = computed(saved.grad_output), x = computed(input), g = computed(saved.gate);
    const OptionalTensor w = if_defined(computed(value_or_undefined(saved.norm.weight))), none;
    const Norm norm = {saved.norm.normalized_shape, w, saved.norm.eps, saved.norm.weight_offset, kNoCasting};
    const Tensor u = computed(grad_outputs[0]), z = computed(grad_outputs[1]), v = computed(grad_outputs[2]);
    const Activation kind = saved.gating().activation;
    const Tensor a = activate(g, kind), slope = activation_slope(g, kind);
    const Tensor z_curvature = z.defined() ? z * activation_curvature(g, kind) : Tensor();
    const auto backward_of_norm = [&](const Tensor& dy, const Tensor& h, std::array<bool, 3> output_mask) {
      return call(RmsNormBackward{dy, h, norm, none, none, output_mask});
    };
    const auto through_backward_of_norm = [&](const variable_list& grad_outputs, const Tensor& dy, const Tensor& h,
                                              const Needed<5>& needed) {
      return Derivative<RmsNormBackward>::backward(grad_outputs, {dy, h, norm, none, none, {}}, needed);
    };

    Tensor for_dy, for_x, for_g, for_w;
    if (saved.norm_before_gate) {
      const auto through_backward = through_backward_of_norm({u, v, {}}, dy * a, x, {true, needed[1], needed[3]});
      if (through_backward[0].defined()) {
        for_dy = through_backward[0] * a;
        for_g = through_backward[0] * dy * slope;
      }
      for_x = through_backward[1];
      for_w = through_backward[2];
      if (z.defined()) {
        const Tensor normed = call(RmsNorm{x, norm, none})[0];
        for_dy = sum_of_defined(for_dy, z * slope * normed);
        for_g = sum_of_defined(for_g, z_curvature * dy * normed);
        const auto [through_x, through_w, _] = backward_of_norm(z * slope * dy, x, {needed[1], needed[3]});
        for_x = sum_of_defined(for_x, through_x);
        for_w = sum_of_defined(for_w, through_w);
      }
    } else {
      const Tensor through_input = u.defined() ? u * a : Tensor();
      const Tensor through_gate = z.defined() ? z * x * slope : Tensor();
      const auto through_backward = through_backward_of_norm({sum_of_defined(through_input, through_gate), v, {}}, dy,
                                                             x * a, {true, true, needed[3]});
      for_dy = through_backward[0];
      if (through_backward[1].defined()) {
        for_x = through_backward[1] * a;
        for_g = through_backward[1] * x * slope;
      }
      for_w = through_backward[2];
      if (u.defined() || z.defined()) {
        const Tensor du = backward_of_norm(dy, x * a, {true})[0];
        if (u.defined()) for_g = sum_of_defined(for_g, u * du * slope);
        if (z.defined()) {
          for_x = sum_of_defined(for_x, z * du * slope);
          for_g = sum_of_defined(for_g, z_curvature * du * x);
        }
      }
    }
    const auto tensors = tensors_of(saved);
    const auto result = [&](size_t index, const Tensor& gradient) {
      return needed[index] && gradient.defined() ? gradient.to(tensors[index]->scalar_type()) : Tensor();
    };
    return {result(0, for_dy), result(1, for_x), result(2, for_g), result(3, for_w)};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<GatedRmsNorm, GatedRmsNormBackward>()); }

}  // namespace normops
