#include "rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormKernels& rms_norm_kernels() {
  static constexpr const RmsNormKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormKernels);
  static const RmsNormKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
