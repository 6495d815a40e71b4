// rms_norm_rope and rms_norm_rope_backward written in ATen operators, which differentiate, see rms_norm.h.
#pragma once
#include "../rms_norm_rope.h"

namespace normops {

Tensor composite(const RmsNormRope& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormRopeBackward& arguments);

// The rotation of rows, and its transpose, which turns gradients back. rows, cos and sin are of one dtype.
Tensor rotate(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope);
Tensor rotate_back(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope);

}  // namespace normops
