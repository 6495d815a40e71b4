// The kernels of add_rms_norm, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

void launch_add_rms_norm(const AddRmsNormArgs& args, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
