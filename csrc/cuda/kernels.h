// The kernels of all operators on raw device pointers: what launch configurations depend on, and how to launch them. No
// torch header.
#pragma once
#include <cstdint>
#include <functional>

#include "../kernel_args.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

// What launch configurations depend on.
struct Device {
  int multiprocessors;
  int64_t shared_bytes;  // the most that a block can have
  int cluster;           // how many blocks the largest cluster has that it runs; 1 without clusters
  bool pdl;              // programmatic dependent launch: whether a kernel can start while the one before it ends
};

// The current device. Throws std::runtime_error if CUDA cannot tell.
Device current_device();

using Stream = void*;  // a cudaStream_t

// All of these need rows > 0 and cols > 0, and throw std::runtime_error if the launch fails. Those of rms_norm and
// rms_norm_backward are also those of the operators with sums.
void launch_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_add_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_gated_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_rms_norm_rope(const KernelArgs& args, const Device& device, Stream stream);

// Allocates partial sums of grad_weight [count, groups, cols] of the compute dtype. The backwards call it if
// grad_weight is wanted, and write them.
using AllocatePartials = std::function<void*(int64_t count)>;
void launch_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                              const AllocatePartials& allocate);
void launch_gated_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                                    const AllocatePartials& allocate);
void launch_rms_norm_rope_backward(const KernelArgs& args, const Device& device, Stream stream,
                                   const AllocatePartials& allocate);

// grad_weight [cols] = sum of partials [count, cols]; these are the columns of all groups
void launch_grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
