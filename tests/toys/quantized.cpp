#include "quantized.h"

#define NORMOPS_KERNEL_SOURCE "quantized.inl"
#include "foreach_isa.h"

NORMOPS_CHOOSE(QuantizedKernels, quantized_kernels, kQuantizedKernels)
