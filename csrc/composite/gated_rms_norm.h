// gated_rms_norm and gated_rms_norm_backward written in ATen operators, which differentiate, see rms_norm.h.
#pragma once
#include "../gated_rms_norm.h"

namespace normops {

Tensor composite(const GatedRmsNorm& arguments);
std::tuple<Tensor, Tensor, Tensor> composite(const GatedRmsNormBackward& arguments);

// An activation at each gate, and its derivative there.
Tensor activate(const Tensor& gate, Activation activation);
Tensor activation_slope(const Tensor& gate, Activation activation);

}  // namespace normops
