#include "rms_norm_rope_kernel.h"

#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const RmsNormRopeKernels& rms_norm_rope_kernels() {
  static constexpr const RmsNormRopeKernels* kVariants[] = NORMOPS_EACH_ISA(kRmsNormRopeKernels);
  static const RmsNormRopeKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
