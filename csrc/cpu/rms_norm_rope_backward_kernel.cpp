#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_backward_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(BackwardKernels, rms_norm_rope_backward_kernels, kRmsNormRopeBackwardKernels)
