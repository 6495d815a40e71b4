// The kernels of add_rms_norm, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

namespace normops::cuda {

struct AddRmsNormArgs {
  DType dtype;
  DType residual_dtype;  // dtype, or float32 beside one of 16 bits
  int64_t rows;
  int64_t cols;
  double eps;
  Weight weight;
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  const void* residual;  // residual_dtype [rows, cols]
  RowLayout residual_rows;
  void* output;  // dtype [rows, cols]
  RowLayout output_rows;
  void* residual_out;  // residual_dtype [rows, cols]: input + residual
  RowLayout residual_out_rows;
};

void launch_add_rms_norm(const AddRmsNormArgs& args, const Device& device, Stream stream);

}  // namespace normops::cuda
