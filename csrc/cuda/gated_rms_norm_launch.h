// The kernels of gated_rms_norm and gated_rms_norm_backward, see rms_norm_launch.h.
#pragma once
#include "../gating.h"
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

struct GatedRmsNormArgs : RmsNormArgs {
  Gating gating;
  DType gate_dtype;  // dtype, or float32 if that has 16 bits, or one of 16 bits if that is float32
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows;
};

// In these RmsNormBackwardArgs, grad_output_dtype is dtype, and there is no grad_residual.
struct GatedRmsNormBackwardArgs : RmsNormBackwardArgs {
  Gating gating;
  DType gate_dtype;
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows;
  void* grad_gate;  // gate_dtype [rows, cols], or null if not wanted
  RowLayout grad_gate_rows;
};

void launch_gated_rms_norm(const GatedRmsNormArgs& args, const Device& device, Stream stream);
void launch_gated_rms_norm_backward(const GatedRmsNormBackwardArgs& args, const Device& device, Stream stream);

// How many partial sums of each group's grad_weight the backward makes. launch_grad_weight sums them.
int64_t gated_rms_norm_backward_partials(DType dtype, int64_t rows, int64_t cols, int64_t groups, const Device& device);

}  // namespace normops::cuda
#pragma GCC visibility pop
