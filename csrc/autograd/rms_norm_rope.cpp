// The derivatives of rms_norm_rope and rms_norm_rope_backward. Nothing is saved but the arguments.
#include "../rms_norm_rope.h"

#include "../composite/rms_norm.h"
#include "../composite/rms_norm_rope.h"
#include "rms_norm.h"

namespace normops {

// Angles are mostly computed of positions, which have no gradient. Where one is asked for, the definition gives it.
template <class Operator>
static bool asks_for_no_angle(const Operator& arguments) {
  return !torch::autograd::compute_requires_grad(arguments.cos, arguments.sin);
}

template <>
struct Derivative<RmsNormRope> {
  static constexpr const char* kName = "RmsNormRopeBackward";
  static constexpr Uses<4, 4> kUses = {{
      // by input, cos, sin, weight
      {true, true, true, true},      // input
      {false, false, false, false},  // cos
      {false, false, false, false},  // sin
      {true, true, true, false},     // weight
  }};
  static bool covers(const RmsNormRope& arguments) { return asks_for_no_angle(arguments); }
  static Tensor output(const RmsNormRope& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const RmsNormRope& saved, const Needed<4>& needed) {
    const auto& [input, cos, sin, norm, rope] = saved;
    auto gradients = call(RmsNormRopeBackward{grad_outputs[0], input, cos, sin, norm, rope, {needed[0], needed[3]}});
    return {gradients[0], Tensor(), Tensor(), gradients[1]};
  }
};

// The derivative of rms_norm_rope_backward, with respect to (grad_output, input, cos, sin, weight): it is
// rms_norm_backward, of gradients that are rotated back, so that what these receive is rotated.
template <>
struct Derivative<RmsNormRopeBackward> {
  static constexpr const char* kName = "RmsNormRopeBackwardBackward";
  static constexpr Uses<5, 5> kUses = {{
      // by grad_output, input, cos, sin, weight
      {false, true, true, true, true},      // grad_output
      {true, true, true, true, true},       // input
      {false, false, false, false, false},  // cos
      {false, false, false, false, false},  // sin
      {true, true, true, true, false},      // weight
  }};
  static bool covers(const RmsNormRopeBackward& arguments) { return asks_for_no_angle(arguments); }
  static variable_list backward(const variable_list& grad_outputs, const RmsNormRopeBackward& saved,
                                const Needed<5>& needed) {
    static const OptionalTensor none;
    const auto& [grad_output, input, given_cos, given_sin, norm, rope, output_mask] = saved;
    const Tensor cos = to_compute_dtype(given_cos, input), sin = to_compute_dtype(given_sin, input);
    const Tensor dy = rotate_back(to_compute_dtype(grad_output, input), cos, sin, rope);
    const auto gradients = Derivative<RmsNormBackward>::backward(
        {grad_outputs[0], grad_outputs[1], {}}, {dy, to_compute_dtype(input, input), norm, none, none, {}},
        {needed[0], needed[1], needed[4]});
    const auto as = [](const Tensor& gradient, const Tensor& like) {
      return gradient.defined() ? gradient.to(like.scalar_type()) : Tensor();
    };
    const Tensor for_dy = gradients[0].defined() ? rotate(gradients[0], cos, sin, rope) : Tensor();
    return {as(for_dy, grad_output), as(gradients[1], input), Tensor(), Tensor(), gradients[2]};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNormRope, RmsNormRopeBackward>()); }

}  // namespace normops
