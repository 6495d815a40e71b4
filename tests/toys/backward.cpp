#include "toys.h"

#define NORMOPS_KERNEL_SOURCE "backward.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const ToyBackwardKernels& toy_backward_kernels() {
  static constexpr const ToyBackwardKernels* kVariants[] = NORMOPS_EACH_ISA(kToyBackwardKernels);
  return *kVariants[static_cast<int>(current_isa())];
}

}  // namespace normops::cpu
