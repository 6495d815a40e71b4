#include "rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_backward_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormBackwardKernels& rms_norm_backward_kernels() {
  static constexpr const RmsNormBackwardKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormBackwardKernels);
  static const RmsNormBackwardKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
