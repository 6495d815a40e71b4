// The kernels of rms_norm_rope and rms_norm_rope_backward, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

void launch_rms_norm_rope(const RmsNormRopeArgs& args, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
