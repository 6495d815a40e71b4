#include "rms_norm_stats_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_stats_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormStatsKernels& rms_norm_stats_kernels() {
  static constexpr const RmsNormStatsKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormStatsKernels);
  static const RmsNormStatsKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
