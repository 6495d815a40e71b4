// The kernels of gated_rms_norm and gated_rms_norm_backward, see rms_norm_kernel.h.
#pragma once
#include "../gating.h"
#include "rms_norm_kernel.h"

namespace normops::cpu {

// What costs an exp is held from the first pass over a row to the second one. Strides of the gate and its gradient
// count bytes, as their dtype is known only when the kernel runs.
struct GatedRmsNormArgs : RmsNormArgs {
  Gating gating;
  DType gate_dtype;  // dtype, or float32 if that has 16 bits, or one of 16 bits if that is float32
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows_in_bytes;
  void* held;  // compute [held_rows, padded_cols], memory of a thread's own, or of the threads that share a row

  // If rows are gated before they are summed: as many as are summed and not written yet, at most.
  int64_t held_rows() const {
    if (gating.norm_before_gate) return 0;
    const int64_t bytes = cols * (dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2);
    return 2 * (bytes <= kNarrowBytes ? kNarrowTile : 1);
  }
};

// In these RmsNormBackwardArgs, grad_output_dtype is dtype, and there is no grad_residual.
struct GatedRmsNormBackwardArgs : RmsNormBackwardArgs {
  Gating gating;
  DType gate_dtype;
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows_in_bytes;
  void* grad_gate;  // gate_dtype [rows, cols], or null if not wanted
  RowLayout grad_gate_rows_in_bytes;
  void* held;  // as in GatedRmsNormArgs

  // Those of a tile.
  int64_t held_rows() const { return kBackwardTile; }
};

using GatedRmsNormKernels = ForwardKernels<GatedRmsNormArgs>;
using GatedRmsNormBackwardKernels = BackwardKernels<GatedRmsNormBackwardArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const GatedRmsNormKernels& gated_rms_norm_kernels();
[[gnu::visibility("default")]] const GatedRmsNormBackwardKernels& gated_rms_norm_backward_kernels();

}  // namespace normops::cpu
