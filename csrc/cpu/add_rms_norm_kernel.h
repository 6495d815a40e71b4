// The kernels of add_rms_norm, see rms_norm_kernel.h.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

// The scale is in the order of residual_dtype.
using AddRmsNormKernels = ForwardKernels<AddRmsNormArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const AddRmsNormKernels& add_rms_norm_kernels();

}  // namespace normops::cpu
