#include "quantized.h"

#define NORMOPS_KERNEL_SOURCE "quantized.inl"
#include "foreach_isa.h"

namespace normops::cpu {

const QuantizedKernels& quantized_kernels() {
  static constexpr const QuantizedKernels* kVariants[] = NORMOPS_EACH_ISA(kQuantizedKernels);
  return *kVariants[static_cast<int>(current_isa())];
}

}  // namespace normops::cpu
