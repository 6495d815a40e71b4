#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(RmsNormKernels, rms_norm_kernels, kRmsNormKernels)
