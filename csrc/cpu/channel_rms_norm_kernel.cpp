#include "kernels.h"

#define NORMOPS_KERNEL_SOURCE "channel_rms_norm_kernel.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(ChannelRmsNormKernels, channel_rms_norm_kernels, kChannelRmsNormKernels)
