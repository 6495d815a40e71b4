#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "add_rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(ForwardKernels, add_rms_norm_kernels, kAddRmsNormKernels)
