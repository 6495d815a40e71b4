// What other derivatives share with those of rms_norm.
#pragma once
#include "node.h"

namespace normops {

constexpr size_t kRmsNormBackwardInputs = 4;

// The derivative of rms_norm_backward, with respect to (grad_output, input, weight, grad_residual), in differentiable
// ATen operators; docs/derivation.md derives it. m is the mean over a row, w the weight with its offset, h the input:
//     grad_input  = r (g - r^2 h m(g h)) + grad_residual    g = dy w,  r = 1 / sqrt(m(h^2) + eps)
//     grad_weight = sum over rows of dy h r
// u and v are the incoming gradients of grad_input and grad_weight.
variable_list rms_norm_backward_backward(const variable_list& grad_outputs, const variable_list& saved,
                                         const NormAttributes& attributes,
                                         const std::array<bool, kRmsNormBackwardInputs>& needed);

}  // namespace normops
