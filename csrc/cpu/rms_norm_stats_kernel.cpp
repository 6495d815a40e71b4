#include "rms_norm_stats_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_stats_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(RmsNormStatsKernels, rms_norm_stats_kernels, kRmsNormStatsKernels)
