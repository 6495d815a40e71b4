#include "rms_norm_rope_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_backward_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormRopeBackwardKernels& rms_norm_rope_backward_kernels() {
  static constexpr const RmsNormRopeBackwardKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormRopeBackwardKernels);
  static const RmsNormRopeBackwardKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
