// The kernels of gated_rms_norm and gated_rms_norm_backward, see rms_norm_kernel.h.
#pragma once
#include "../gating.h"
#include "rms_norm_kernel.h"

namespace normops::cpu {

// What costs an exp is held from the first pass over a row to the second one.
struct GatedRmsNormArgs : RmsNormArgs {
  Gating gating;
  DType gate_dtype;     // dtype, or float32 and 16 bits beside each other
  const void* gate;     // gate_dtype [rows, cols]
  RowLayout gate_rows;  // its strides count bytes
  void* held;           // compute [held_rows, padded_cols], of each thread, or of those that share a row

  // Of rows that are gated first: those that have been summed and not been written.
  int64_t held_rows() const {
    if (gating.norm_before_gate) return 0;
    const int64_t bytes = cols * (dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2);
    return 2 * (bytes <= kNarrowBytes ? kNarrowGroup : 1);
  }
};

// Of RmsNormBackwardArgs, grad_output_dtype is dtype, and there is no grad_residual.
struct GatedRmsNormBackwardArgs : RmsNormBackwardArgs {
  Gating gating;
  DType gate_dtype;
  const void* gate;          // gate_dtype [rows, cols]
  RowLayout gate_rows;       // its strides count bytes, as do
  void* grad_gate;           // gate_dtype [rows, cols], or null if not wanted
  RowLayout grad_gate_rows;  // those of these
  void* held;                // as in GatedRmsNormArgs

  // Those of a group.
  int64_t held_rows() const { return kRowGroup; }
};

using GatedRmsNormKernels = ForwardKernels<GatedRmsNormArgs>;
using GatedRmsNormBackwardKernels = BackwardKernels<GatedRmsNormBackwardArgs>;

// Those for current_isa().
[[gnu::visibility("default")]] const GatedRmsNormKernels& gated_rms_norm_kernels();
[[gnu::visibility("default")]] const GatedRmsNormBackwardKernels& gated_rms_norm_backward_kernels();

}  // namespace normops::cpu
