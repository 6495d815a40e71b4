// The kernels of rms_norm_stats, rms_norm_from_stats and their backwards, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

void launch_rms_norm_stats(const RmsNormStatsArgs& args, const Device& device, Stream stream);
void launch_rms_norm_from_stats(const RmsNormFromStatsArgs& args, const Device& device, Stream stream);
void launch_rms_norm_backward_stats(const RmsNormBackwardStatsArgs& args, const Device& device, Stream stream);

// Of grad_weight it makes as many partial sums as rms_norm_backward.
void launch_rms_norm_backward_from_stats(const RmsNormBackwardFromStatsArgs& args, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
