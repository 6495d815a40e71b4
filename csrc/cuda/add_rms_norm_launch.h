// The kernels of add_rms_norm, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

// RmsNormArgs::dtype is the dtype of input and output.
struct AddRmsNormArgs : RmsNormArgs {
  DType residual_dtype;  // dtype, or float32 beside one of 16 bits
  const void* residual;  // residual_dtype [rows, cols]
  RowLayout residual_rows;
  void* residual_out;  // residual_dtype [rows, cols]: input + residual
  RowLayout residual_out_rows;
};

void launch_add_rms_norm(const AddRmsNormArgs& args, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
