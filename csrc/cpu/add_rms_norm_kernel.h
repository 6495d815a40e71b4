// The kernels of add_rms_norm, see rms_norm_kernel.h.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

// RmsNormArgs::dtype is the dtype of input and output; scale is held in the order of residual_dtype.
struct AddRmsNormArgs : RmsNormArgs {
  DType residual_dtype;  // dtype, or float32
  const void* residual;  // residual_dtype [rows, cols]
  RowLayout residual_rows;
  void* residual_out;  // residual_dtype [rows, cols]: input + residual
  RowLayout residual_out_rows;
};

using AddRmsNormKernels = ForwardKernels<AddRmsNormArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const AddRmsNormKernels& add_rms_norm_kernels();

}  // namespace normops::cpu
