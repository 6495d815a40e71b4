// The kernels of rms_norm_rope and rms_norm_rope_backward, see rms_norm_launch.h.
#pragma once
#include "rms_norm_launch.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

void launch_rms_norm_rope(const RmsNormRopeArgs& args, const Device& device, Stream stream);
void launch_rms_norm_rope_backward(const RmsNormRopeBackwardArgs& args, const Device& device, Stream stream);

// How many partial sums of each group's grad_weight the backward makes. launch_grad_weight sums them.
int64_t rms_norm_rope_backward_partials(DType dtype, int64_t rows, int64_t cols, int64_t groups,
                                        const Rotation& rotation, const Device& device);

}  // namespace normops::cuda
#pragma GCC visibility pop
