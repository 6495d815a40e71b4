// The kernels of rms_norm_stats, rms_norm_from_stats and their backwards, see rms_norm_kernel.h. No row is shared.
#pragma once
#include "rms_norm_kernel.h"

namespace normops::cpu {

struct RmsNormStatsKernels {
  ForwardKernels<RmsNormStatsArgs> stats;
  ForwardKernels<RmsNormFromStatsArgs> from_stats;
};

struct RmsNormBackwardStatsKernels {
  BackwardKernels<RmsNormBackwardStatsArgs> stats;
  BackwardKernels<RmsNormBackwardFromStatsArgs> from_stats;
};

// The kernels for current_isa().
[[gnu::visibility("default")]] const RmsNormStatsKernels& rms_norm_stats_kernels();
[[gnu::visibility("default")]] const RmsNormBackwardStatsKernels& rms_norm_backward_stats_kernels();

}  // namespace normops::cpu
