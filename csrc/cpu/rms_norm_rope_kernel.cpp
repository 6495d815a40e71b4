#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(ForwardKernels, rms_norm_rope_kernels, kRmsNormRopeKernels)
