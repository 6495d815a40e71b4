// The kernels of gated_rms_norm and gated_rms_norm_backward, see rms_norm_kernel.h.
#pragma once
#include "rms_norm_kernel.h"
#include "row_config.h"

namespace normops::cpu {

// What costs an exp is held from the first pass over a row to the second one. If rows are gated before they are summed,
// that is in the output itself, unless that has no room for it, is the weight, or is written around the caches. A row
// of 16 KiB that is held elsewhere, together with the scale, is more than a first-level cache has room for (a tenth,
// and with narrow rows a quarter).
inline bool holds_in_output(const CpuArgs<GatedRmsNormArgs>& args) {
  return !args.gating.norm_before_gate && !args.stream && compute_dtype(args.dtype) == args.dtype &&
         args.output != args.weight.data;
}

// Elsewhere, there are the rows of a tile.
inline int64_t held_rows(const CpuArgs<GatedRmsNormArgs>& args) {
  if (args.gating.norm_before_gate || holds_in_output(args)) return 0;
  return args.cols * size_of(args.dtype) <= kMostTiledBytes ? kForwardTile : 1;
}

// Those of a tile.
inline int64_t held_rows(const CpuArgs<GatedRmsNormBackwardArgs>&) { return kBackwardTile; }

using GatedRmsNormKernels = ForwardKernels<GatedRmsNormArgs>;
using GatedRmsNormBackwardKernels = BackwardKernels<GatedRmsNormBackwardArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const GatedRmsNormKernels& gated_rms_norm_kernels();
[[gnu::visibility("default")]] const GatedRmsNormBackwardKernels& gated_rms_norm_backward_kernels();

}  // namespace normops::cpu
