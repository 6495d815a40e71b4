#include "add_rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "add_rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(AddRmsNormKernels, add_rms_norm_kernels, kAddRmsNormKernels)
