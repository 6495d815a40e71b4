// What other derivatives share with those of rms_norm.
#pragma once
#include "../rms_norm.h"
#include "kernels.h"

namespace normops {

// The derivative of rms_norm_backward, with respect to (grad_output, input, weight, grad_residual, bias), in
// differentiable ATen operators; docs/derivation.md derives it. m is the mean over a row, w the weight with its offset,
// h the input:
//     grad_input  = r (g - r^2 h m(g h)) + grad_residual    g = dy w,  r = 1 / sqrt(m(h^2) + eps)
//     grad_weight = sum over rows of dy h r
//     grad_bias   = sum over rows of dy
// u, v and b are the incoming gradients of grad_input, grad_weight and grad_bias.
template <>
struct Derivative<RmsNormBackward> {
  static constexpr const char* kName = "RmsNormBackwardBackward";
  static constexpr Uses<5, 5> kUses = {{
      // by grad_output, input, weight, grad_residual, bias
      {false, true, true, false, false},    // grad_output
      {true, true, true, false, false},     // input
      {true, true, false, false, false},    // weight
      {false, false, false, false, false},  // grad_residual
      {false, false, false, false, false},  // bias
  }};
  static variable_list backward(const variable_list& grad_outputs, const RmsNormBackward& saved,
                                const Needed<5>& needed);
};

}  // namespace normops
