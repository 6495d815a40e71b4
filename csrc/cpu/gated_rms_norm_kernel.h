// The kernels of gated_rms_norm and gated_rms_norm_backward, see rms_norm_kernel.h.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

// What costs an exp is held from the first pass over a row to the second one. If rows are gated before they are summed:
// of as many as are summed and not written yet, at most.
inline int64_t held_rows(const GatedRmsNormArgs& args) {
  if (args.gating.norm_before_gate) return 0;
  return 2 * (args.cols * size_of(args.dtype) <= kNarrowBytes ? kNarrowTile : 1);
}

// Those of a tile.
inline int64_t held_rows(const GatedRmsNormBackwardArgs&) { return kBackwardTile; }

using GatedRmsNormKernels = ForwardKernels<GatedRmsNormArgs>;
using GatedRmsNormBackwardKernels = BackwardKernels<GatedRmsNormBackwardArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const GatedRmsNormKernels& gated_rms_norm_kernels();
[[gnu::visibility("default")]] const GatedRmsNormBackwardKernels& gated_rms_norm_backward_kernels();

}  // namespace normops::cpu
