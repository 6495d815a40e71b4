// The kernels of all operators on raw pointers: their arguments, and functions that return the kernels for this
// machine. No torch header.
#pragma once
#include <cstdint>

#include "../channels.h"
#include "../kernel_args.h"
#include "leaves.h"
#include "row_config.h"

namespace normops::cpu {

// Only kernels read and write the scale and the sums over rows. Both have one vector of compute_dtype(dtype) over the
// columns per group of the weight, see ScaleLayout. The kernels choose the order of columns within a block. Row r
// belongs to group r % groups.
constexpr int64_t kLongestBlock = 32;  // columns
inline int64_t padded_cols(DType dtype, int64_t cols) {
  const int64_t block = dtype == DType::bfloat16 ? kLongestBlock : 16;
  return (cols + block - 1) / block * block;
}

// The columns of a row that kernels process in pairs: i with i + pairs, or adjacent ones.
struct RotaryColumns {
  int64_t offset = 0;
  int64_t pairs = 0;
  bool are_interleaved = false;
};

// Maps columns to packed positions in the scale and in sums over rows. Segments of columns are consecutive, each padded
// to whole blocks, so that every block of first columns of pairs has a block of second ones.
class ScaleLayout {
 public:
  ScaleLayout(DType dtype, int64_t cols, const RotaryColumns& paired = {}) {
    const auto [offset, pairs, are_interleaved] = paired;
    const int64_t end = offset + 2 * pairs;
    if (offset > 0) add(dtype, offset);
    if (pairs > 0 && !are_interleaved) add(dtype, offset + pairs);
    if (pairs > 0) add(dtype, end);
    if (end < cols || count_ == 0) add(dtype, cols);
  }

  int64_t packed_cols() const { return packed_[count_]; }

  // Returns whether packed positions equal columns.
  bool is_natural() const { return packed_[count_] == columns_[count_]; }

  // Returns whether all segments begin with a cache line, given that the row does.
  bool has_lines(int64_t element_bytes) const {
    bool result = true;
    for (int i = 0; i < count_; i++) result &= columns_[i] * element_bytes % 64 == 0;
    return result;
  }

  // Calls visit(column, packed, count) for the segments of packed numbers [begin, end): columns [column, column +
  // count) are at `packed`.
  template <class Visit>
  void each(int64_t begin, int64_t end, const Visit& visit) const {
    for (int i = 0; i < count_; i++) {
      const int64_t first = begin > packed_[i] ? begin - packed_[i] : 0, length = columns_[i + 1] - columns_[i],
                    last = end - packed_[i] < length ? end - packed_[i] : length;
      if (first < last) visit(columns_[i] + first, packed_[i] + first, last - first);
    }
  }

 private:
  void add(DType dtype, int64_t end) {
    packed_[count_ + 1] = packed_[count_] + padded_cols(dtype, end - columns_[count_]);
    columns_[++count_] = end;
  }

  int count_ = 0;
  int64_t columns_[5] = {}, packed_[5] = {};  // where each begins, and the end of the last one
};

// The columns of a span. Each span of a row is summed separately, and the sums of the spans are added from left to
// right in float64.
constexpr int64_t kSpan = 1024;

// The maximum number of positions of a tile.
constexpr int64_t kMostPositions = 256;

// Scratch positions of each channel for a gradient through an activation. A cache line more than a tile keeps channels
// from being a multiple of 1024 bytes apart.
constexpr int64_t kFormedPositions = kMostPositions + 16;

// Per-thread kernel options and scratch.
struct CpuArgs : KernelArgs {
  bool non_temporal = false;            // for outputs that exceed the caches
  const Channels* channels = nullptr;   // of the channel operators, whose positions are contiguous
  const float* channel_bias = nullptr;  // [cols], or null
  int64_t first_group = 0;              // the first one in scale and sums
  const void* scale = nullptr;          // compute [groups, packed_cols]: weight + its offset
  void* row_scratch = nullptr;          // compute [scratch_rows, padded_cols]

  // For backward kernels.
  int64_t part_rows = 0;              // of all regions of the thread
  int64_t rows_per_leaf = INT64_MAX;  // of each group
  // Sums over rows for grad_weight and grad_bias: compute [most_sums, groups, packed_cols], or null if not requested.
  // Consecutive sums are sum_stride numbers apart.
  int64_t sum_stride = 0;
  void* grad_weight_sums = nullptr;
  void* grad_bias_sums = nullptr;
};

// Returns the columns that are processed in pairs.
inline RotaryColumns paired_columns(const Rotation& rotation) {
  return {rotation.offset, rotation.pairs, rotation.interleaved};
}

// Returns whether the first pass over a row caches its gated values, which cost an exp each, in the output. The output
// needs the compute dtype and regular stores, and must not be the weight. Scratch for a row of 16 KiB and the scale
// together exceed a first-level cache (a tenth slower, and with narrow rows a quarter).
inline bool holds_in_output(const CpuArgs& args) {
  return !args.gating.norm_before_gate && !args.non_temporal && compute_dtype(args.dtype()) == args.dtype() &&
         args[kOutput].data != args.weight.data;
}

// Returns how many rows of scratch a kernel needs: those of a tile.
inline int64_t scratch_rows(const CpuArgs& args) {
  if (args.channels != nullptr) return args.channels->is_activated && args.has(kGradOutput) ? kFormedPositions : 0;
  if (!args.has(kGate)) return 0;
  if (args.has(kGradOutput)) return kBackwardTile;
  if (args.gating.norm_before_gate || holds_in_output(args)) return 0;
  return args.cols * size_of(args.dtype()) <= kMostTiledBytes ? kForwardTile : 1;
}

// Computes output[begin:end], or square_sum[begin:end] if only sums are requested.
using ForwardKernel = void (*)(const CpuArgs& args, int64_t begin, int64_t end);

// Computes the gradients of the region's rows, and the sums over rows that each_sum() visits for its leaves.
using BackwardKernel = void (*)(const CpuArgs& args, const Region& region);

struct RmsNormKernels {
  // Computes scale[:count] = weight[:count] + weight_offset.
  void (*scale)(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t count);
  ForwardKernel forward;
};

// A sum over rows of a group, after which the last two sums are added `merges` times.
struct ParameterSum {
  const void* numbers;
  int merges;
};

struct RmsNormBackwardKernels {
  BackwardKernel backward;
  // Computes grad_weight[:columns] = columns [first, first + columns) of the total of these sums.
  void (*grad_weight)(DType dtype, DType weight_dtype, const ParameterSum* sums, int64_t count, int64_t first,
                      void* grad_weight, int64_t columns);
};

// The kernels of a norm over channels.
struct ChannelRmsNormKernels {
  ForwardKernel forward;
  BackwardKernel backward;
};

#pragma GCC visibility push(default)  // for the operators, which are in another library
// Return the kernels for current_isa(). Operators with sums use those of rms_norm and rms_norm_backward.
const RmsNormKernels& rms_norm_kernels();
const RmsNormBackwardKernels& rms_norm_backward_kernels();
const ForwardKernel& add_rms_norm_kernel();
const ChannelRmsNormKernels& channel_rms_norm_kernels();
const ForwardKernel& gated_rms_norm_kernel();
const BackwardKernel& gated_rms_norm_backward_kernel();
const ForwardKernel& rms_norm_rope_kernel();
const BackwardKernel& rms_norm_rope_backward_kernel();
#pragma GCC visibility pop

}  // namespace normops::cpu
