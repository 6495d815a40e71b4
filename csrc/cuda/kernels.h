// Launchers of the kernels of all operators, on raw device pointers, and the device properties that they depend on.
// Includes no torch header.
#pragma once
#include <cstdint>
#include <functional>

#include "../kernel_args.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

// The device properties that launch configurations depend on.
struct Device {
  int multiprocessors;
  int64_t shared_bytes;  // the maximum of a block
  int cluster;           // the number of blocks of the largest cluster that it runs; 1 without clusters
  bool pdl;              // programmatic dependent launch: whether a kernel can start while the one before it ends
};

// Returns the properties of the current device. Throws std::runtime_error if CUDA fails.
Device current_device();

using Stream = void*;  // a cudaStream_t

// All launchers require rows > 0 and cols > 0, and throw std::runtime_error if the launch fails. Those of rms_norm and
// rms_norm_backward also launch the operators with statistics.
void launch_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_add_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_gated_rms_norm(const KernelArgs& args, const Device& device, Stream stream);
void launch_rms_norm_rope(const KernelArgs& args, const Device& device, Stream stream);

// Allocates partial sums of grad_weight [count, groups, cols] of the compute dtype. The backwards call it if
// grad_weight is wanted, and write the sums.
using AllocatePartials = std::function<void*(int64_t count)>;
void launch_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                              const AllocatePartials& allocate);
void launch_gated_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                                    const AllocatePartials& allocate);
void launch_rms_norm_rope_backward(const KernelArgs& args, const Device& device, Stream stream,
                                   const AllocatePartials& allocate);

// grad_weight [cols] = sum of partials [count, cols], where cols counts the columns of all groups
void launch_grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, const Device& device, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
