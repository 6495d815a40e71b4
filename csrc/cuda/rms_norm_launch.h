// The kernels of rms_norm and rms_norm_backward on raw device pointers: what they take, and how to launch them. No
// torch header.
#pragma once
#include <cstdint>

#include "../dispatch.h"
#include "../rows.h"

#pragma GCC visibility push(default)  // for the operators, which are another library
namespace normops::cuda {

// What launch configurations depend on.
struct Device {
  int multiprocessors;
  int64_t shared_bytes;  // the most that a block can have
  int cluster;           // how many blocks the largest cluster has that it runs; 1 without clusters
  bool early_start;      // whether a kernel can start while the one before it ends
};

// The current device. Throws std::runtime_error if CUDA cannot tell.
Device current_device();

using Stream = void*;  // a cudaStream_t

// A weight. Row r is multiplied by that of group r % groups.
struct Weight {
  const void* data;  // [groups, cols], or null for ones
  DType dtype;
  double offset;
  int64_t groups;  // 1 without data
};

// Rows of the outputs may coincide with rows of the inputs: each element is read before it is written.
struct RmsNormArgs {
  DType dtype;
  int64_t rows;
  int64_t cols;
  double eps;
  Weight weight;
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  void* output;  // dtype [rows, cols]
  RowLayout output_rows;
};

struct RmsNormBackwardArgs {
  DType dtype;
  DType grad_output_dtype;  // dtype, or beside float32 one of 16 bits
  int64_t rows;
  int64_t cols;
  double eps;
  Weight weight;
  const void* grad_output;  // grad_output_dtype [rows, cols]
  RowLayout grad_output_rows;
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  const void* grad_residual;  // dtype [rows, cols], or null for 0; only with grad_input
  RowLayout grad_residual_rows;
  void* grad_input;  // dtype [rows, cols], or null if not wanted
  RowLayout grad_input_rows;
  void* grad_weight_partials;  // compute [rms_norm_backward_partials, groups, cols], or null if not wanted
};

// All of these need rows > 0 and cols > 0, and throw std::runtime_error if the launch fails.
void launch_rms_norm(const RmsNormArgs& args, const Device& device, Stream stream);
void launch_rms_norm_backward(const RmsNormBackwardArgs& args, const Device& device, Stream stream);

// How many partial sums of each group's grad_weight the backward makes.
int64_t rms_norm_backward_partials(DType dtype, DType grad_output_dtype, int64_t rows, int64_t cols, int64_t groups,
                                   const Device& device);

// grad_weight [cols] = sum of partials [count, cols]; these are the columns of all groups
void launch_grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, Stream stream);

}  // namespace normops::cuda
#pragma GCC visibility pop
