// The kernels of all operators on raw pointers: what they take, and where to get those for this machine. No torch
// header.
#pragma once
#include <cstdint>

#include "../kernel_args.h"
#include "leaves.h"
#include "row_config.h"

namespace normops::cpu {

// Scale and the sums of rows, which only kernels read and write, are of compute_dtype(dtype): one vector over the
// columns for each group of the weight, which ScaleLayout describes, with the columns of a block in an order of the
// kernels' own. Row r is of group r % groups.
constexpr int64_t kLongestBlock = 32;  // columns
inline int64_t padded_cols(DType dtype, int64_t cols) {
  const int64_t block = dtype == DType::bfloat16 ? kLongestBlock : 16;
  return (cols + block - 1) / block * block;
}

// The columns of a row that kernels form in pairs: i with i + pairs, or neighbours.
struct RotaryColumns {
  int64_t offset = 0;
  int64_t pairs = 0;
  bool are_interleaved = false;
};

// Maps columns to their places in the scale and in sums of rows. Segments of columns follow one another, each
// padded to whole blocks, so that a block of the first columns of pairs has one of the second ones.
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

  // Whether each column has its own place.
  bool is_natural() const { return packed_[count_] == columns_[count_]; }

  // Whether all segments of a row that begins with a cache line do so.
  bool has_lines(int64_t element_bytes) const {
    bool result = true;
    for (int i = 0; i < count_; i++) result &= columns_[i] * element_bytes % 64 == 0;
    return result;
  }

  // Calls visit(column, packed, count) for the segments of the packed numbers from `begin` to `end`: `count` columns,
  // from `column` on, are at `packed`.
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
  int64_t columns_[5] = {}, packed_[5] = {};  // where each begins, and behind the last one
};

// The columns of a span. A sum over a row is formed within each span, and the sums of the spans are added from left to
// right in float64.
constexpr int64_t kSpan = 1024;

// How tensors [samples, channels, positions] lie whose channels are normalized: the positions of a channel follow one
// another. A row is a position, and the rows of a sample follow one another. Weights, bias and sums are float32, in the
// order of channels, and so are rows for whoever lays these out.
struct Channels {
  DType dtype;  // float32 or bfloat16
  int64_t positions;
  int64_t sample_strides[kTensorCount], channel_strides[kTensorCount];  // in bytes
  const float* bias;                                                    // [cols], or null
  bool is_activated;                                                    // behind the bias, as gating says
};

// The most positions of a tile.
constexpr int64_t kMostPositions = 256;

// For how many positions there is scratch in each channel, where a gradient comes through an activation: those of a
// tile, and a line more, so that channels do not lie a multiple of 1024 bytes apart.
constexpr int64_t kFormedPositions = kMostPositions + 16;

// What a thread gives a kernel besides: how it is to go about it, and memory.
struct CpuArgs : KernelArgs {
  bool non_temporal = false;           // whether outputs are too large for the caches, and stored around them
  const Channels* channels = nullptr;  // of the operators over channels
  int64_t first_group = 0;             // of scale and sums
  const void* scale = nullptr;         // compute [groups, packed_cols]: weight + its offset
  void* row_scratch =
      nullptr;  // compute [scratch_rows, padded_cols], of the thread, or of the threads that share a row

  // Of a backward.
  int64_t part_rows = 0;              // of all regions that the thread has
  int64_t rows_per_leaf = INT64_MAX;  // of each group
  // The sums of rows for grad_weight and grad_bias: compute [most_sums, groups, packed_cols], or null if not wanted.
  // One sum lies sum_stride numbers behind another.
  int64_t sum_stride = 0;
  void* grad_weight_sums = nullptr;
  void* grad_bias_sums = nullptr;
};

// The columns that are formed in pairs.
inline RotaryColumns paired_columns(const Rotation& rotation) {
  return {rotation.offset, rotation.pairs, rotation.interleaved};
}

// The first pass over a row keeps the results of exp for the second one: if rows are gated before they are summed,
// in the output itself, unless that has no room for it, is the weight, or is written around the caches. A row
// of 16 KiB that is kept elsewhere, together with the scale, is more than a first-level cache has room for (a tenth,
// and with narrow rows a quarter).
inline bool holds_in_output(const CpuArgs& args) {
  return !args.gating.norm_before_gate && !args.non_temporal && compute_dtype(args.dtype()) == args.dtype() &&
         args[kOutput].data != args.weight.data;
}

// How many rows a kernel holds something of elsewhere: those of a tile.
inline int64_t scratch_rows(const CpuArgs& args) {
  if (args.channels != nullptr) return args.channels->is_activated && args.has(kGradOutput) ? kFormedPositions : 0;
  if (!args.has(kGate)) return 0;
  if (args.has(kGradOutput)) return kBackwardTile;
  if (args.gating.norm_before_gate || holds_in_output(args)) return 0;
  return args.cols * size_of(args.dtype()) <= kMostTiledBytes ? kForwardTile : 1;
}

// The kernels of a forward.
struct ForwardKernels {
  // Computes output[begin:end], or, if they are all that is wanted, square_sum[begin:end].
  void (*rows)(const CpuArgs& args, int64_t begin, int64_t end);
  // Two steps for one row that threads share. The first one computes squares[begin:end], the sums of x^2 over these
  // spans; the second one, when their total is known, output[row, begin:end], where begin is a multiple of
  // kLongestBlock. They are null if columns are formed in pairs: then no row is shared.
  void (*sums)(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares);
  void (*columns)(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end);
};

struct RmsNormKernels {
  // Computes scale[:count] = weight[:count] + weight_offset.
  void (*scale)(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t count);
  ForwardKernels forward;
};

// The kernels of a backward.
struct BackwardKernels {
  // Computes the gradients of these rows, and their sums: as many as each_sum() visits for the leaves.
  void (*rows)(const CpuArgs& args, const Region& region);
  // Two steps for one row that threads share, to be called for the rows in their order. The first one computes
  // squares[begin:end] and dots[begin:end], the sums over these spans of x^2 and of dy * scale * x (0 if no rows are
  // written); the second one columns [begin:end] of the row's gradients, and of the sums, whose first leaf is the
  // group's first one. They are null as those of a forward.
  void (*sums)(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots);
  void (*columns)(const CpuArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end);
};

// A sum of rows of a group, behind which the last two sums are added so many times.
struct RowSum {
  const void* numbers;
  int additions;
};

struct RmsNormBackwardKernels {
  BackwardKernels backward;
  // Computes grad_weight[:columns] = the one sum that is left of these, columns [first:first + columns].
  void (*grad_weight)(DType dtype, DType weight_dtype, const RowSum* sums, int64_t count, int64_t first,
                      void* grad_weight, int64_t columns);
};

// The kernels of a norm over channels. Threads share no row of them.
struct ChannelRmsNormKernels {
  ForwardKernels forward;
  BackwardKernels backward;
};

#pragma GCC visibility push(default)  // for the operators, which are another library
// The kernels for current_isa(). Those of rms_norm and rms_norm_backward are also those of the operators with sums.
const RmsNormKernels& rms_norm_kernels();
const RmsNormBackwardKernels& rms_norm_backward_kernels();
const ForwardKernels& add_rms_norm_kernels();
const ChannelRmsNormKernels& channel_rms_norm_kernels();
const ForwardKernels& gated_rms_norm_kernels();
const BackwardKernels& gated_rms_norm_backward_kernels();
const ForwardKernels& rms_norm_rope_kernels();
const BackwardKernels& rms_norm_rope_backward_kernels();
#pragma GCC visibility pop

}  // namespace normops::cpu
