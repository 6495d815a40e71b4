#include "gated_rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(GatedRmsNormKernels, gated_rms_norm_kernels, kGatedRmsNormKernels)
