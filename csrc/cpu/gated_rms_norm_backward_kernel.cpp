#include "gated_rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_backward_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const GatedRmsNormBackwardKernels& gated_rms_norm_backward_kernels() {
  static constexpr const GatedRmsNormBackwardKernels* kVariants[] = NORMOPS_EACH_ISA(kGatedRmsNormBackwardKernels);
  static const GatedRmsNormBackwardKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
