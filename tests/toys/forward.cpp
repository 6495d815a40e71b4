#include "toys.h"

#define NORMOPS_KERNEL_SOURCE "forward.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const ToyKernels& toy_kernels() {
  static constexpr const ToyKernels* kVariants[] = NORMOPS_EACH_ISA(kToyKernels);
  return *kVariants[static_cast<int>(current_isa())];
}

}  // namespace normops::cpu
