// The kernels of rms_norm and rms_norm_backward on raw pointers: what they take, and where to get those for this
// machine. No torch header.
#pragma once
#include <cstdint>

#include "../kernel_args.h"

namespace normops::cpu {

// Scale and the partials of grad_weight, which only kernels read and write, are of compute_dtype(dtype): one vector
// over the columns for each group of the weight, padded to whole blocks, with the columns in an order of the kernels'
// own. Row r is of group r % groups: it has that scale, and is summed into that partial, which is [chunks, groups,
// padded_cols].
constexpr int64_t kLongestBlock = 32;  // columns
inline int64_t padded_cols(DType dtype, int64_t cols) {
  const int64_t block = dtype == DType::bfloat16 ? kLongestBlock : 16;
  return (cols + block - 1) / block * block;
}

// How many partial sums of grad_weight each group has, where each is over `rows_per_chunk` of the group's rows.
inline int64_t chunk_count(int64_t rows, int64_t rows_per_chunk) {
  return (rows + rows_per_chunk - 1) / rows_per_chunk;
}

// The columns of a span. A sum over a row is formed within each span, and the sums of the spans are added from left to
// right in float64.
constexpr int64_t kSpan = 1024;

// What a thread gives a kernel besides: how it is to go about it, and memory.
template <class Args>
struct CpuArgs : Args {
  bool stream = false;          // whether what is written is too large for the caches
  int64_t rows_per_chunk = 0;   // of each group; of a backward
  const void* scale = nullptr;  // compute [groups, padded_cols]: weight + its offset
  void* held = nullptr;         // compute [held_rows, padded_cols], of the thread, or of the threads that share a row
};

// Rows that a kernel holds something of between its passes.
template <class Args>
int64_t held_rows(const CpuArgs<Args>&) {
  return 0;
}

// The kernels of a forward.
template <class Args>
struct ForwardKernels {
  // Computes output[begin:end].
  void (*rows)(const CpuArgs<Args>& args, int64_t begin, int64_t end);
  // Two steps for one row that threads share. The first one computes squares[begin:end], the sums of x^2 over these
  // spans; the second one, when their total is known, output[row, begin:end], where begin is a multiple of
  // kLongestBlock. They may be null: then no row is shared.
  void (*sums)(const CpuArgs<Args>& args, int64_t row, int64_t begin, int64_t end, double* squares);
  void (*columns)(const CpuArgs<Args>& args, int64_t row, double square_sum, int64_t begin, int64_t end);
};

struct RmsNormKernels {
  // Computes scale[group, begin:end] = weight[group, begin:end] + weight_offset; begin is a multiple of kLongestBlock.
  void (*scale)(DType dtype, DType weight_dtype, const void* weight, double weight_offset, int64_t cols, void* scale,
                int64_t group, int64_t begin, int64_t end);
  ForwardKernels<RmsNormArgs> forward;
};

// The kernels of a backward.
template <class Args>
struct BackwardKernels {
  // Computes the gradients of the rows in parts [begin:end], and their partials; part p is the rows of chunk p / groups
  // that are of group p % groups.
  void (*rows)(const CpuArgs<Args>& args, int64_t begin, int64_t end);
  // Two steps for one row that threads share, to be called for the rows in their order. The first one computes
  // squares[begin:end] and dots[begin:end], the sums over these spans of x^2 and of dy * scale * x (0 if no rows are
  // written); the second one columns [begin:end] of the row's gradients, which it adds to the chunk's partial.
  void (*sums)(const CpuArgs<Args>& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots);
  void (*columns)(const CpuArgs<Args>& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end);
};

struct RmsNormBackwardKernels {
  BackwardKernels<RmsNormBackwardArgs> backward;
  // Computes grad_weight[group, begin:end] = sum over chunks of partials[:, group, begin:end]; begin is a multiple of
  // kLongestBlock.
  void (*grad_weight)(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t groups,
                      int64_t cols, void* grad_weight, int64_t group, int64_t begin, int64_t end);
};

// The kernels for current_isa().
[[gnu::visibility("default")]] const RmsNormKernels& rms_norm_kernels();
[[gnu::visibility("default")]] const RmsNormBackwardKernels& rms_norm_backward_kernels();

}  // namespace normops::cpu
