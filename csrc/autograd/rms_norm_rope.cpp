// The derivatives of rms_norm_rope and rms_norm_rope_backward. Nothing is saved but the arguments.
#include "../rms_norm_rope.h"

#include "../composite/composite.h"
#include "kernels.h"

namespace normops {

namespace {

// Angles are mostly computed from positions, which have no gradient. If one is requested, composite() computes it.
template <class Operator>
bool has_constant_angles(const Operator& arguments) {
  return !torch::autograd::compute_requires_grad(arguments.cos, arguments.sin);
}

}  // namespace

template <>
struct Derivative<RmsNormRope> {
  static constexpr const char* kName = "RmsNormRopeBackward";
  static constexpr Uses<4, 4> kNeededForGrad = {{
      // depends on: input, cos, sin, weight
      {true, true, true, true},      // input
      {false, false, false, false},  // cos
      {false, false, false, false},  // sin
      {true, true, true, false},     // weight
  }};
  static bool handles_all_grads(const RmsNormRope& arguments) { return has_constant_angles(arguments); }
  static Tensor output(const RmsNormRope& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const RmsNormRope& saved, const Needed<4>& needed) {
    const auto& [input, cos, sin, norm, rope] = saved;
    auto gradients = call(RmsNormRopeBackward{grad_outputs[0], input, cos, sin, norm, rope, {needed[0], needed[3]}});
    return {gradients[0], Tensor(), Tensor(), gradients[1]};
  }
};

template <>
struct Derivative<RmsNormRopeBackward> {
  static constexpr const char* kName = "RmsNormRopeBackwardBackward";
  static bool handles_all_grads(const RmsNormRopeBackward& arguments) { return has_constant_angles(arguments); }
  static variable_list backward(const variable_list& grad_outputs, const RmsNormRopeBackward& saved, const Needed<5>&) {
    const auto as_computed = [&](const Tensor& tensor) { return to_compute_dtype(tensor, saved.input); };
    const Tensor cos = as_computed(saved.cos), sin = as_computed(saved.sin);
    const Tensor dy = rotate_back(as_computed(saved.grad_output), cos, sin, saved.rope);
    const auto [of_dy, of_input, of_weight] = normalize_backward_backward(
        as_computed(grad_outputs[0]), as_computed(grad_outputs[1]), dy, as_computed(saved.input), saved.norm);
    return {rotate(of_dy, cos, sin, saved.rope), of_input, Tensor(), Tensor(), of_weight};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNormRope, RmsNormRopeBackward>()); }

}  // namespace normops
