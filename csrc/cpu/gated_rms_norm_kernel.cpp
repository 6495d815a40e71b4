#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(ForwardKernels, gated_rms_norm_kernels, kGatedRmsNormKernels)
