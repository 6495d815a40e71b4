// The kernels of rms_norm and rms_norm_backward on raw pointers: what they take, and where to get those for this
// machine. No torch header.
#pragma once
#include <cstdint>

#include "../kernel_args.h"

namespace normops::cpu {

// Scale and the partials of grad_weight, which only kernels read and write, are of compute_dtype(dtype): one vector
// over the columns for each group of the weight, which HeldOrder describes, with the columns of a block in an order of
// the kernels' own. Row r is of group r % groups: it has that scale, and is summed into that partial, which is [chunks,
// groups, held_cols].
constexpr int64_t kLongestBlock = 32;  // columns
inline int64_t padded_cols(DType dtype, int64_t cols) {
  const int64_t block = dtype == DType::bfloat16 ? kLongestBlock : 16;
  return (cols + block - 1) / block * block;
}

// The columns of a row that kernels form in pairs: those of a stretch, i with i + pairs, or neighbours.
struct PairedColumns {
  int64_t offset = 0;
  int64_t pairs = 0;
  bool are_neighbours = false;
};

// Maps columns to their places in the multipliers and the partial sums. Stretches of columns follow one another, each
// padded to whole blocks, so that a block of the first columns of pairs has one of the second ones.
class HeldOrder {
 public:
  HeldOrder(DType dtype, int64_t cols, const PairedColumns& paired = {}) {
    const auto [offset, pairs, are_neighbours] = paired;
    const int64_t end = offset + 2 * pairs;
    if (offset > 0) add(dtype, offset);
    if (pairs > 0 && !are_neighbours) add(dtype, offset + pairs);
    if (pairs > 0) add(dtype, end);
    if (end < cols || count_ == 0) add(dtype, cols);
  }

  int64_t held_cols() const { return held_[count_]; }

  // Whether each column has its own place.
  bool is_natural() const { return held_[count_] == columns_[count_]; }

  // Whether all stretches of a row that begins with a cache line do so.
  bool has_lines(int64_t element_bytes) const {
    bool result = true;
    for (int i = 0; i < count_; i++) result &= columns_[i] * element_bytes % 64 == 0;
    return result;
  }

  // Calls visit(column, held, count) for the stretches of what is held from `begin` to `end`: `count` columns, from
  // `column` on, are at `held`.
  template <class Visit>
  void each(int64_t begin, int64_t end, const Visit& visit) const {
    for (int i = 0; i < count_; i++) {
      const int64_t first = begin > held_[i] ? begin - held_[i] : 0, length = columns_[i + 1] - columns_[i],
                    last = end - held_[i] < length ? end - held_[i] : length;
      if (first < last) visit(columns_[i] + first, held_[i] + first, last - first);
    }
  }

 private:
  void add(DType dtype, int64_t end) {
    held_[count_ + 1] = held_[count_] + padded_cols(dtype, end - columns_[count_]);
    columns_[++count_] = end;
  }

  int count_ = 0;
  int64_t columns_[5] = {}, held_[5] = {};  // where each begins, and behind the last one
};

// How many partial sums of grad_weight each group has, where each is over `rows_per_chunk` of the group's rows.
inline int64_t chunk_count(int64_t rows, int64_t rows_per_chunk) {
  return (rows + rows_per_chunk - 1) / rows_per_chunk;
}

// The columns of a span. A sum over a row is formed within each span, and the sums of the spans are added from left to
// right in float64.
constexpr int64_t kSpan = 1024;

// Sums over the rows of rms_norm_backward, numbers of the compute dtype, which are given, or all that is wanted.
struct RowSums {
  bool are_given;
  int64_t size;  // of a whole row, of which cols may be a part
  void* square_sum;
  RowLayout square_sum_rows;
  void* dot;
  RowLayout dot_rows;
};

// What a thread gives a kernel besides: how it is to go about it, and memory.
template <class Args>
struct CpuArgs : Args {
  bool stream = false;            // whether what is written is too large for the caches
  int64_t rows_per_chunk = 0;     // of each group; of a backward
  const void* scale = nullptr;    // compute [groups, held_cols]: weight + its offset
  void* held = nullptr;           // compute [held_rows, padded_cols], of the thread, or of the threads that share a row
  const RowSums* sums = nullptr;  // of rms_norm_backward, or null where it forms them and uses them
};

// The columns that the kernels of an operator form in pairs.
template <class Args>
PairedColumns paired_columns(const Args&) {
  return {};
}

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
  // kLongestBlock. They are null if columns are formed in pairs: then no row is shared.
  void (*sums)(const CpuArgs<Args>& args, int64_t row, int64_t begin, int64_t end, double* squares);
  void (*columns)(const CpuArgs<Args>& args, int64_t row, double square_sum, int64_t begin, int64_t end);
};

struct RmsNormKernels {
  // Computes scale[:count] = weight[:count] + weight_offset.
  void (*scale)(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t count);
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
  // written); the second one columns [begin:end] of the row's gradients, which it adds to the chunk's partial. They are
  // null as those of a forward.
  void (*sums)(const CpuArgs<Args>& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots);
  void (*columns)(const CpuArgs<Args>& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end);
};

struct RmsNormBackwardKernels {
  BackwardKernels<RmsNormBackwardArgs> backward;
  // Computes grad_weight[:count] = the sum over so many chunks of partials[chunk, :count], `stride` numbers apart.
  void (*grad_weight)(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t stride,
                      void* grad_weight, int64_t count);
};

// The kernels for current_isa().
[[gnu::visibility("default")]] const RmsNormKernels& rms_norm_kernels();
[[gnu::visibility("default")]] const RmsNormBackwardKernels& rms_norm_backward_kernels();

}  // namespace normops::cpu
