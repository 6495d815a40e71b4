// An operator that normops does not have. It shows what the loops of the CPU kernels carry that its own do not need:
// outputs of another type than the input, and a second statistic of a row.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

// output, int8 [rows, cols], times the row's step is rms_norm(x): the step is the largest magnitude / 127.
struct QuantizedArgs : RmsNormArgs {
  float* steps;
  RowLayout step_rows;
};

struct QuantizedKernels {
  void (*rows)(const CpuArgs<QuantizedArgs>& args, int64_t begin, int64_t end);
};

// The kernels for current_isa().
const QuantizedKernels& quantized_kernels();

}  // namespace normops::cpu
