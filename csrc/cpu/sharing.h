// How threads share the rows of a call, or the columns of its rows if they are few and wide.
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

// Elements a thread should at least have: waking a second one costs about as much as a thread needs for these.
constexpr int64_t kGrainElements = 16384;

inline int64_t grain(int64_t elements_each) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_each));
}

// How much memory a Scratch has on the stack, in doubles.
constexpr int64_t kStackNumbers = 2048;

// How many doubles, in whole cache lines, hold `count` numbers of the compute type.
inline int64_t scratch_numbers(DType dtype, int64_t count) {
  constexpr int64_t kLine = 8;
  const int64_t numbers = compute_dtype(dtype) == DType::float64 ? count : (count + 1) / 2;
  return (numbers + kLine - 1) / kLine * kLine;
}

// The memory of each thread's Scratch, unless that is small enough for the stack. It is allocated before the threads
// begin, as a thread that shares work could not tell anybody that there is no memory.
class ThreadsMemory {
 public:
  ThreadsMemory(DType dtype, int64_t count, int64_t threads) : numbers_(scratch_numbers(dtype, count)) {
    // torch's allocator says how much it could not get.
    if (numbers_ > kStackNumbers) memory_ = c10::GetCPUAllocator()->allocate(threads * numbers_ * sizeof(double));
  }

  // The memory of a thread's Scratch, or null if that lies on the stack.
  double* of(int64_t thread) const noexcept {
    return memory_ ? static_cast<double*>(memory_.get()) + thread * numbers_ : nullptr;
  }

 private:
  int64_t numbers_;
  c10::DataPtr memory_;
};

// Uninitialised memory for numbers of the compute type; small amounts lie on the stack.
class Scratch {
 public:
  Scratch(const ThreadsMemory& memory, int64_t thread) noexcept : data_(memory.of(thread)) {
    if (data_ == nullptr) data_ = small_;
  }
  Scratch(const Scratch&) = delete;
  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }

 private:
  double* data_;
  alignas(64) double small_[kStackNumbers];
};

// A Scratch for `count` numbers, for where no threads share the work yet.
class OwnScratch : ThreadsMemory, public Scratch {
 public:
  OwnScratch(DType dtype, int64_t count) : ThreadsMemory(dtype, count, 1), Scratch(*this, 0) {}
};

// Shares vectors over the columns, one for each group, among the threads, in whole blocks: calls
// function(group, begin, end) for columns [begin, end).
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

// Whether threads share each row: there are fewer rows than threads, and a row is long enough to be worth it.
inline bool shares_rows(int64_t rows, int64_t cols) {
  return cols >= 2 * kGrainElements && rows < at::get_num_threads();
}

// Sums over the spans of a row, one after another as a kernel that has the row to itself adds them.
class SpanSums {
 public:
  explicit SpanSums(int64_t cols) : count_((cols + kSpan - 1) / kSpan), sums_(DType::float64, count_) {}
  double* data() { return static_cast<double*>(sums_.data()); }
  int64_t count() const { return count_; }
  double total() { return std::accumulate(data(), data() + count_, 0.0); }
  // That of a row, which may be given instead, or wanted.
  double total(const KernelArgs& args, TensorIndex index, int64_t row) {
    if (args.sums == Sums::formed) return total();
    return dispatch(args.dtype(), [&]<class T>() -> double {
      auto* const number = reinterpret_cast<compute_t<T>*>(RowIterator(args[index], row).next());
      if (args.sums == Sums::wanted) *number = static_cast<compute_t<T>>(total());
      return *number == *number ? *number : std::numeric_limits<double>::quiet_NaN();
    });
  }

 private:
  int64_t count_;
  OwnScratch sums_;
};

// The arguments of a call for each of the threads that share it: to those that all have in common it adds the scale,
// which a thread may convert for itself, and the memory for what kernels hold of a row. scale.own_count() is how many
// numbers a thread needs memory for to convert the scale, and scale.in(own) is the scale, in that memory or elsewhere.
template <class Scale>
class ThreadsArgs {
 public:
  ThreadsArgs(const CpuArgs& args, const Scale& scale, int64_t threads)
      : args_(args),
        scale_(scale),
        scales_(args.dtype(), scale.own_count(), threads),
        held_(args.dtype(), held_rows(args) * padded_cols(args.dtype(), args.cols), threads) {}

  // Calls function(args) in a thread.
  template <class Function>
  void call(int64_t thread, const Function& function) const
      noexcept(std::is_nothrow_invocable_v<Function, const CpuArgs&>) {
    static_assert(noexcept(scale_.in(std::declval<Scratch&>())));
    Scratch own(scales_, thread), held(held_, thread);
    CpuArgs args = args_;
    args.scale = scale_.in(own);
    args.held = held.data();
    function(args);
  }

 private:
  const CpuArgs& args_;
  const Scale& scale_;
  ThreadsMemory scales_, held_;
};

// Calls function(args, first, last) with each thread's arguments for its part of [0, end).
template <class Scale, class Function>
void share_out(const CpuArgs& args, const Scale& scale, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, const CpuArgs&, int64_t, int64_t>);
  const ThreadsArgs threads(args, scale, thread_count(end, grain));
  parallel_for_threads(0, end, grain, [&](int64_t thread, int64_t first, int64_t last) noexcept {
    threads.call(thread, [&](const CpuArgs& args) noexcept { function(args, first, last); });
  });
}

template <class Scale>
void run_forward(const ForwardKernels& kernels, const CpuArgs& args, const Scale& scale) {
  if (kernels.sums == nullptr || !shares_rows(args.rows, args.cols)) {
    share_out(args, scale, args.rows, grain(args.cols),
              [&](const CpuArgs& args, int64_t begin, int64_t end) noexcept { kernels.rows(args, begin, end); });
    return;
  }
  SpanSums squares(args.cols);
  ThreadsArgs(args, scale, 1).call(0, [&](const CpuArgs& args) {
    for (int64_t row = 0; row < args.rows; row++) {
      const auto sum = [&](int64_t begin, int64_t end) noexcept {
        kernels.sums(args, row, begin, end, squares.data());
      };
      if (args.sums != Sums::given) parallel_for(0, squares.count(), kGrainElements / kSpan, sum);
      const double square_sum = squares.total(args, kSquareSum, row);
      if (args.sums == Sums::wanted) continue;
      parallel_for_columns(1, args.cols, kGrainElements, [&](int64_t, int64_t begin, int64_t end) noexcept {
        kernels.columns(args, row, square_sum, begin, end);
      });
    }
  });
}

template <class Scale>
void run_backward(const BackwardKernels& kernels, const CpuArgs& args, const Scale& scale) {
  if (kernels.sums == nullptr || !shares_rows(args.rows, args.cols)) {
    const int64_t groups = args.weight.groups;
    const int64_t parts = chunk_count(args.rows / groups, args.rows_per_chunk) * groups;
    share_out(args, scale, parts, grain(args.rows_per_chunk * args.cols),
              [&](const CpuArgs& args, int64_t begin, int64_t end) noexcept { kernels.rows(args, begin, end); });
    return;
  }
  SpanSums squares(args.cols), dots(args.cols);
  ThreadsArgs(args, scale, 1).call(0, [&](const CpuArgs& args) {
    for (int64_t row = 0; row < args.rows; row++) {
      const auto sum = [&](int64_t begin, int64_t end) noexcept {
        kernels.sums(args, row, begin, end, squares.data(), dots.data());
      };
      if (args.sums != Sums::given) parallel_for(0, squares.count(), kGrainElements / kSpan, sum);
      const double square_sum = squares.total(args, kSquareSum, row), dot = dots.total(args, kDot, row);
      if (args.sums == Sums::wanted) continue;
      parallel_for_columns(1, args.cols, kGrainElements, [&](int64_t, int64_t begin, int64_t end) noexcept {
        kernels.columns(args, row, square_sum, dot, begin, end);
      });
    }
  });
}

}  // namespace normops::cpu
