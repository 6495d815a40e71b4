#include "gated_rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const GatedRmsNormKernels& gated_rms_norm_kernels() {
  static constexpr const GatedRmsNormKernels* kVariants[] = NORMOPS_EACH_ISA(kGatedRmsNormKernels);
  static const GatedRmsNormKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
