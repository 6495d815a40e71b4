// The kernels of rms_norm_rope and rms_norm_rope_backward, see rms_norm_kernel.h.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

inline PairedColumns paired_columns(const Rotation& rotation) {
  return {rotation.offset, rotation.pairs, rotation.interleaved};
}
inline PairedColumns paired_columns(const CpuArgs<RmsNormRopeArgs>& args) { return paired_columns(args.rotation); }
inline PairedColumns paired_columns(const CpuArgs<RmsNormRopeBackwardArgs>& args) {
  return paired_columns(args.rotation);
}

using RmsNormRopeKernels = ForwardKernels<RmsNormRopeArgs>;
using RmsNormRopeBackwardKernels = BackwardKernels<RmsNormRopeBackwardArgs>;

// The kernels for current_isa().
[[gnu::visibility("default")]] const RmsNormRopeKernels& rms_norm_rope_kernels();
[[gnu::visibility("default")]] const RmsNormRopeBackwardKernels& rms_norm_rope_backward_kernels();

}  // namespace normops::cpu
