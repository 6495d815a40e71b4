// Operators that normops does not have. They show what the loops of the CPU kernels carry that its own do not need:
// outputs of another type than the input, a second statistic of a row, columns that are finished in pairs or with their
// neighbours, and rows of another tensor beside those that are normalized.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

// y = rms_norm(x), rotated by the angles of the row: columns c and c + pairs together, or 2 * c and 2 * c + 1. Of
// neighbours, cos and sin have all columns, and the sines of even columns the other sign.
struct RotatedArgs : RmsNormArgs {
  int64_t pairs;          // the columns from 2 * pairs on are not rotated; 0: neighbours
  const void *cos, *sin;  // dtype
  RowLayout angle_rows;
};

// output, int8 [rows, cols], times the row's step is rms_norm(x): the step is the largest magnitude / 127.
struct QuantizedArgs : RmsNormArgs {
  float* steps;
  RowLayout step_rows;
};

// The gradients of a rotated norm with pairs.
struct RotatedBackwardArgs : RmsNormBackwardArgs {
  int64_t pairs;
  const void *cos, *sin;
  RowLayout angle_rows;
};

struct ToyKernels {
  // Puts a row of the scale, or of a partial of grad_weight, into the order of kernels with pairs, and back;
  // held_cols() is its length.
  int64_t (*held_cols)(DType dtype, int64_t cols, int64_t pairs);
  void (*to_pairs)(DType dtype, const void* row, int64_t cols, int64_t pairs, void* held);
  void (*from_pairs)(DType dtype, const void* held, int64_t cols, int64_t pairs, void* row);
  void (*rotated)(const CpuArgs<RotatedArgs>& args, int64_t begin, int64_t end);
  void (*quantized)(const CpuArgs<QuantizedArgs>& args, int64_t begin, int64_t end);
};

struct ToyBackwardKernels {
  void (*rotated)(const CpuArgs<RotatedBackwardArgs>& args, int64_t begin, int64_t end);
};

// The kernels for current_isa().
const ToyKernels& toy_kernels();
const ToyBackwardKernels& toy_backward_kernels();

}  // namespace normops::cpu
