// The kernels of rms_norm and rms_norm_backward on raw pointers: what they take, and where to get those for this
// machine. No torch header.
#pragma once
#include <cstdint>

#include "../dispatch.h"
#include "../rows.h"

namespace normops::cpu {

// Data pointers are of `dtype`, those called compute of compute_dtype(dtype). Rows of the outputs may coincide with
// rows of the inputs: each element is read before it is written. Vectors over the columns that only kernels read and
// write (scale, partials) are padded to whole blocks and hold the columns in an order of the kernels' own. There is one
// for each group: row r has the scale, and is summed into the partial, of group r % groups.
constexpr int64_t kLongestBlock = 32;  // columns
inline int64_t padded_cols(DType dtype, int64_t cols) {
  const int64_t block = dtype == DType::bfloat16 ? kLongestBlock : 16;
  return (cols + block - 1) / block * block;
}

// The partials of grad_weight of a group, each of so many of its rows.
inline int64_t chunk_count(int64_t rows, int64_t rows_per_chunk) {
  return (rows + rows_per_chunk - 1) / rows_per_chunk;
}

// Sums over a row are formed in spans of so many columns, then over the spans from left to right in float64.
constexpr int64_t kSpan = 1024;

// The forward sums rows before it writes them: those of at most so many bytes in groups of so many. There are as many
// again that are being written.
constexpr int64_t kNarrowBytes = 2048;
constexpr int kNarrowGroup = 8;

// Wider ones are written while others are summed. Some of rms_norm's are written before others are read: those of at
// most so many columns that are too wide for groups; and of those that lie at equal distances and need no conversion,
// those of 256 bytes in groups of so many, and those of at least so many bytes where a thread writes more than the
// second-level cache has room for beside what it reads. See docs/performance.md.
constexpr int64_t kPlainCols = 2 * kSpan;
constexpr int kPlainGroup = 16;
constexpr int64_t kPlainBytes = 512;
constexpr int64_t kPlainShare = 1 << 20;

// Rows of the backward that go through its two passes together.
constexpr int kRowGroup = 8;

struct RmsNormArgs {
  DType dtype;
  int64_t cols;
  double eps;
  const void* input;  // [rows, cols]
  RowLayout input_rows;
  const void* scale;  // compute [groups, padded_cols]: weight + weight_offset
  int64_t groups;
  void* output;  // [rows, cols]
  RowLayout output_rows;
  bool stream;  // whether output is too large for the caches
};

struct RmsNormBackwardArgs {
  DType dtype;
  DType grad_output_dtype;  // dtype, or with float32 one of 16 bits
  int64_t rows;
  int64_t cols;
  double eps;
  const void* grad_output;  // grad_output_dtype [rows, cols]
  RowLayout grad_output_rows;
  const void* input;  // [rows, cols]
  RowLayout input_rows;
  const void* scale;  // compute [groups, padded_cols]
  int64_t groups;
  const void* grad_residual;  // [rows, cols], or null for 0; only with grad_input
  RowLayout grad_residual_rows;
  void* grad_input;  // [rows, cols], or null if not wanted
  RowLayout grad_input_rows;
  void* grad_weight_partials;  // compute [chunks, groups, padded_cols], or null if not wanted
  int64_t rows_per_chunk;      // of each group
  bool stream;                 // whether grad_input is too large for the caches
};

// The kernels of a forward.
template <class Args>
struct ForwardKernels {
  // output[begin:end]
  void (*rows)(const Args& args, int64_t begin, int64_t end);
  // The same for one row that threads share: squares[begin:end], the sums over these spans of x^2, and, when their
  // total is known, output[row, begin:end]; there begin is a multiple of kLongestBlock.
  void (*sums)(const Args& args, int64_t row, int64_t begin, int64_t end, double* squares);
  void (*columns)(const Args& args, int64_t row, double square_sum, int64_t begin, int64_t end);
};

struct RmsNormKernels {
  // scale[group, begin:end] = weight[group, begin:end] + weight_offset; begin is a multiple of kLongestBlock.
  void (*scale)(DType dtype, DType weight_dtype, const void* weight, double weight_offset, int64_t cols, void* scale,
                int64_t group, int64_t begin, int64_t end);
  ForwardKernels<RmsNormArgs> forward;
};

// Those of a backward.
template <class Args>
struct BackwardKernels {
  // What is written of the rows of parts [begin:end], and what they add to grad_weight_partials; part p is that of
  // chunk p / groups and group p % groups.
  void (*rows)(const Args& args, int64_t begin, int64_t end);
  // The same for one row that threads share: squares[begin:end] and dots[begin:end], the sums over these spans of x^2
  // and dy * scale * x (0 if no rows are written); then columns [begin:end] of the row and what it adds to its
  // chunk's partial, rows being taken in order.
  void (*sums)(const Args& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots);
  void (*columns)(const Args& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end);
};

struct RmsNormBackwardKernels {
  BackwardKernels<RmsNormBackwardArgs> backward;
  // grad_weight[group, begin:end] = sum over chunks of partials[:, group, begin:end]; begin is a multiple of
  // kLongestBlock.
  void (*grad_weight)(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t groups,
                      int64_t cols, void* grad_weight, int64_t group, int64_t begin, int64_t end);
};

// Those for current_isa().
[[gnu::visibility("default")]] const RmsNormKernels& rms_norm_kernels();
[[gnu::visibility("default")]] const RmsNormBackwardKernels& rms_norm_backward_kernels();

}  // namespace normops::cpu
