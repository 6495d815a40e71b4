// The derivatives of rms_norm_rope and rms_norm_rope_backward. Nothing is saved but the arguments.
#include "../rms_norm_rope.h"

#include "kernels.h"

namespace normops {

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
  // Angles are mostly computed from positions, which have no gradient. If one is requested, composite() computes it.
  static bool handles_all_grads(const RmsNormRope& arguments) {
    return !torch::autograd::compute_requires_grad(arguments.cos, arguments.sin);
  }
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
  static constexpr Uses<5, 5> kNeededForGrad = {{
      // depends on: grad_output, input, cos, sin, weight
      {false, true, true, true, true},  // grad_output
      {true, true, true, true, true},   // input
      {true, true, true, true, true},   // cos
      {true, true, true, true, true},   // sin
      {true, true, true, true, false},  // weight
  }};
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNormRope, RmsNormRopeBackward>()); }

}  // namespace normops
