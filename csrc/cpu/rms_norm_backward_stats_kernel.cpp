#include "rms_norm_stats_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_backward_stats_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormBackwardStatsKernels& rms_norm_backward_stats_kernels() {
  static constexpr const RmsNormBackwardStatsKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormBackwardStatsKernels);
  static const RmsNormBackwardStatsKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
