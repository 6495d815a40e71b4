#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_backward_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(RmsNormBackwardKernels, rms_norm_backward_kernels, kRmsNormBackwardKernels)
