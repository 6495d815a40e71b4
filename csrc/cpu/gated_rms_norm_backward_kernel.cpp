#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_backward_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(BackwardKernels, gated_rms_norm_backward_kernels, kGatedRmsNormBackwardKernels)
