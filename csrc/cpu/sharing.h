// Splits the rows of a call among threads, or the columns of the rows of a backward if they are few and wide, as in the
// decoder of T5-XXL: a batch of eight with one label each has 8 rows of 4096 columns.
#pragma once
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels.h"
#include "parallel.h"
#include "row_iterator.h"

namespace normops::cpu {

// The size of a Scratch's stack memory, in doubles.
constexpr int64_t kStackNumbers = 2048;

// Returns how many doubles, in whole cache lines, hold `count` numbers of the compute type.
inline int64_t scratch_numbers(DType dtype, int64_t count) {
  constexpr int64_t kLine = 8;
  const int64_t numbers = compute_dtype(dtype) == DType::float64 ? count : (count + 1) / 2;
  return (numbers + kLine - 1) / kLine * kLine;
}

// The memory of each part's Scratch, unless the stack has room for it. It is allocated before the threads begin, as a
// thread of a parallel loop cannot report a failed allocation.
class PartsMemory {
 public:
  PartsMemory(DType dtype, int64_t count, int64_t parts) : numbers_(scratch_numbers(dtype, count)) {
    // Uses torch's allocator, whose error reports the requested size.
    if (numbers_ > kStackNumbers) memory_ = c10::GetCPUAllocator()->allocate(parts * numbers_ * sizeof(double));
  }

  // Returns the memory of a part's Scratch, or null if it is on the stack.
  double* of(int64_t part) const noexcept {
    return memory_ ? static_cast<double*>(memory_.get()) + part * numbers_ : nullptr;
  }

 private:
  int64_t numbers_;
  c10::DataPtr memory_;
};

// Uninitialised memory for numbers of the compute type; small amounts are on the stack.
class Scratch {
 public:
  Scratch(const PartsMemory& memory, int64_t part) noexcept : data_(memory.of(part)) {
    if (data_ == nullptr) data_ = small_;
  }
  Scratch(const Scratch&) = delete;
  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }

 private:
  double* data_;
  alignas(64) double small_[kStackNumbers];
};

// A Scratch for `count` numbers, for use outside of parallel loops.
class OwnScratch : PartsMemory, public Scratch {
 public:
  OwnScratch(DType dtype, int64_t count) : PartsMemory(dtype, count, 1), Scratch(*this, 0) {}
};

// Splits the columns of all groups among the threads, in whole blocks: calls function(group, begin, end) for columns
// [begin, end) of a group.
template <class Function>
void parallel_for_columns(int64_t groups, int64_t cols, int64_t grain_columns, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t, int64_t>);
  const int64_t blocks = (cols + kLongestBlock - 1) / kLongestBlock;
  parallel_for(0, groups * blocks, std::max<int64_t>(1, grain_columns / kLongestBlock),
               [&](int64_t begin, int64_t end) noexcept {
                 while (begin < end) {
                   const int64_t group = begin / blocks, first = begin % blocks,
                                 last = std::min(blocks, first + end - begin);
                   function(group, first * kLongestBlock, std::min(last * kLongestBlock, cols));
                   begin += last - first;
                 }
               });
}

// Sums over the spans of some rows, added in the same order as by a kernel that has a row to itself.
class SpanSums {
 public:
  SpanSums(int64_t rows, int64_t cols) : count_((cols + kSpan - 1) / kSpan), sums_(DType::float64, rows * count_) {}
  double* of(int64_t row) { return static_cast<double*>(sums_.data()) + row * count_; }
  int64_t count() const { return count_; }
  double total(int64_t row) { return std::accumulate(of(row), of(row) + count_, 0.0); }
  // Returns the total of a row, row `of_args` of the arguments. Reads an input sum, and stores a requested one.
  double total(int64_t row, const KernelArgs& args, TensorIndex index, int64_t of_args) {
    if (args.sums == Sums::compute) return total(row);
    return dispatch(args.dtype(), [&]<class T>() -> double {
      auto* const number = reinterpret_cast<compute_t<T>*>(RowIterator(args[index], of_args).next());
      if (args.sums == Sums::output) *number = static_cast<compute_t<T>>(total(row));
      return *number == *number ? *number : std::numeric_limits<double>::quiet_NaN();
    });
  }

 private:
  int64_t count_;
  OwnScratch sums_;
};

// Memory for the parts of a call: each has the kernels' row scratch, and `own_count` more numbers.
class PartsArgs {
 public:
  PartsArgs(const CpuArgs& args, int64_t own_count, int64_t parts)
      : args_(args),
        own_(args.dtype(), own_count, parts),
        row_scratch_(args.dtype(), scratch_rows(args) * padded_cols(args.dtype(), args.cols), parts) {}

  // Calls function(args, own) with the arguments of a part and its own_count numbers.
  template <class Function>
  void call(int64_t part, const Function& function) const
      noexcept(std::is_nothrow_invocable_v<Function, CpuArgs&, Scratch&>) {
    Scratch own(own_, part), row_scratch(row_scratch_, part);
    CpuArgs args = args_;
    args.row_scratch = row_scratch.data();
    function(args, own);
  }

 private:
  const CpuArgs& args_;
  PartsMemory own_, row_scratch_;
};

// Calls function(part, args, own, first, last) for the parts of [0, end).
template <class Function>
void parallel_over_rows(const CpuArgs& args, int64_t own_count, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, CpuArgs&, Scratch&, int64_t, int64_t>);
  const PartsArgs parts(args, own_count, part_count(end, grain));
  parallel_for_parts(0, end, grain, [&](int64_t part, int64_t first, int64_t last) noexcept {
    parts.call(part, [&](CpuArgs& args, Scratch& own) noexcept { function(part, args, own, first, last); });
  });
}

// Runs the kernels of a forward. `scale` is weight + its offset: scale.own_count() is the scratch that a part needs for
// it, and scale.converted(own, group, groups) returns the scale of some groups, in that scratch or elsewhere.
template <class Scale>
void run_forward(const ForwardKernels& kernels, const CpuArgs& args, const Scale& scale) {
  const int64_t groups = args.weight.groups;
  parallel_over_rows(args, scale.own_count(), args.rows, grain(args.cols),
                     [&](int64_t, CpuArgs& args, Scratch& own, int64_t begin, int64_t end) noexcept {
                       args.scale = scale.converted(own, 0, groups);
                       kernels.rows(args, begin, end);
                     });
}

// Returns whether threads split each row of a backward.
inline bool splits_each_row(const BackwardKernels& kernels, const Division& division) {
  return kernels.sums != nullptr && division.splits_each_row(at::get_num_threads());
}

// The sums over rows that threads split, for as many rows as they split at a time.
struct SharedSums {
  SpanSums squares, dots;

  SharedSums(int64_t rows, int64_t cols) : squares(rows, cols), dots(rows, cols) {}
};

// Runs a backward on `count` rows of a group, from row `first` of the arguments on; threads split each row. A thread
// gets the same columns in both steps, so that it finds them in its caches.
inline void run_shared_rows(const BackwardKernels& kernels, const CpuArgs& args, int64_t first, int64_t count,
                            SharedSums& sums) {
  auto& [squares, dots] = sums;
  const auto row = [&](int64_t r) { return first + r * args.weight.groups; };
  // Each row uses the scratch of one row of a tile.
  CpuArgs of_row[kSharedRows];
  for (int64_t r = 0; r < count; r++) {
    of_row[r] = args;
    if (scratch_rows(args) == 0) continue;
    of_row[r].row_scratch = static_cast<char*>(args.row_scratch) +
                            r * padded_cols(args.dtype(), args.cols) * size_of(compute_dtype(args.dtype()));
  }
  const auto sum = [&](int64_t begin, int64_t end) noexcept {
    for (int64_t r = 0; r < count; r++) kernels.sums(of_row[r], row(r), begin, end, squares.of(r), dots.of(r));
  };
  if (args.sums != Sums::input) parallel_for(0, squares.count(), grain(count * kSpan), sum);
  double square_sums[kSharedRows], row_dots[kSharedRows];
  for (int64_t r = 0; r < count; r++) {
    square_sums[r] = squares.total(r, args, kSquareSum, row(r));
    row_dots[r] = dots.total(r, args, kDot, row(r));
  }
  if (args.sums == Sums::output) return;
  parallel_for_columns(1, args.cols, grain(count), [&](int64_t, int64_t begin, int64_t end) noexcept {
    for (int64_t r = 0; r < count; r++) kernels.columns(of_row[r], row(r), square_sums[r], row_dots[r], begin, end);
  });
}

static_assert(kSharedRows <= kBackwardTile);  // the rows that have scratch

// Runs the kernels of a backward. `parameters` are the scale, and the gradients of weight and bias.
// parameters.own_count() is the scratch that a part needs for them. parameters.begin(args, own, part, region) sets the
// arguments for a region; parameters.end(part, region) is called after it.
template <class Parameters>
void run_backward(const BackwardKernels& kernels, const CpuArgs& args, const Division& division,
                  Parameters& parameters) {
  if (!splits_each_row(kernels, division)) {
    parallel_over_rows(args, parameters.own_count(), division.units(), division.grain(),
                       [&](int64_t part, CpuArgs& args, Scratch& own, int64_t begin, int64_t end) noexcept {
                         args.part_rows = (end - begin) * division.rows_per_unit() * division.groups_per_strip();
                         division.each_region(begin, end, [&](const Region& region) {
                           parameters.begin(args, own, part, region);
                           kernels.rows(args, region);
                           parameters.end(part, region);
                         });
                       });
    return;
  }
  SharedSums sums(kSharedRows, args.cols);
  PartsArgs(args, parameters.own_count(), 1).call(0, [&](CpuArgs& args, Scratch& own) {
    // A strip is one group, as rows are long.
    division.each_region(0, division.units(), [&](const Region& strip) {
      parameters.begin(args, own, 0, strip);
      for (int64_t row = 0; row < strip.rows; row += kSharedRows) {
        run_shared_rows(kernels, args, row * args.weight.groups + strip.group,
                        std::min<int64_t>(kSharedRows, strip.rows - row), sums);
      }
      parameters.end(0, strip);
    });
  });
}

}  // namespace normops::cpu
