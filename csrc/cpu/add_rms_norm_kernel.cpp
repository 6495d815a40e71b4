#include "add_rms_norm_kernel.h"

#define NORMOPS_KERNEL_SOURCE "add_rms_norm_kernel.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const AddRmsNormKernels& add_rms_norm_kernels() {
  static constexpr const AddRmsNormKernels* kVariants[] = NORMOPS_EACH_ISA(kAddRmsNormKernels);
  static const AddRmsNormKernels& kernels = *kVariants[static_cast<int>(current_isa())];
  return kernels;
}

}  // namespace normops::cpu
