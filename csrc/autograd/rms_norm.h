// What other derivatives share with those of rms_norm.
#pragma once
#include "../rms_norm.h"
#include "kernels.h"

namespace normops {

// The derivative of rms_norm_backward, with respect to (grad_output, input, weight, grad_residual), in differentiable
// ATen operators; docs/derivation.md derives it. m is the mean over a row, w the weight with its offset, h the input:
//     grad_input  = r (g - r^2 h m(g h)) + grad_residual    g = dy w,  r = 1 / sqrt(m(h^2) + eps)
//     grad_weight = sum over rows of dy h r
// u and v are the incoming gradients of grad_input and grad_weight.
template <>
struct Derivative<RmsNormBackward> {
  static constexpr const char* kName = "RmsNormBackwardBackward";
  static constexpr Uses<4, 4> kUses = {{
      // by grad_output, input, weight, grad_residual
      {false, true, true, false},    // grad_output
      {true, true, true, false},     // input
      {true, true, false, false},    // weight
      {false, false, false, false},  // grad_residual
  }};
  static variable_list backward(const variable_list& grad_outputs, const RmsNormBackward& saved,
                                const Needed<4>& needed);
};

}  // namespace normops
