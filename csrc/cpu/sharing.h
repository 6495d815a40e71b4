// How threads share the rows of a call, or the columns of its rows if they are few and wide.
#pragma once
#include <c10/util/SmallBuffer.h>

#include <algorithm>
#include <numeric>

#include "parallel.h"
#include "rms_norm_kernel.h"

namespace normops::cpu {

// Elements a thread should at least have: waking a second one costs about as much as a thread needs for these.
constexpr int64_t kGrainElements = 16384;

inline int64_t grain(int64_t elements_each) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_each));
}

// Uninitialised memory for `count` numbers of the compute type; small amounts lie on the stack.
class Scratch {
 public:
  Scratch(DType dtype, int64_t count) : buffer_(compute_dtype(dtype) == DType::float64 ? count : (count + 1) / 2) {}
  Scratch(const Scratch&) = delete;
  void* data() { return buffer_.data(); }
  const void* data() const { return buffer_.data(); }

 private:
  c10::SmallBuffer<double, 2048> buffer_;
};

// Shares vectors over the columns, one for each group, among the threads, in whole blocks: calls
// function(group, begin, end) for columns [begin, end).
template <class Function>
void parallel_for_columns(int64_t groups, int64_t cols, int64_t grain_columns, const Function& function) {
  const int64_t blocks = (cols + kLongestBlock - 1) / kLongestBlock;
  parallel_for(
      0, groups * blocks, std::max<int64_t>(1, grain_columns / kLongestBlock), [&](int64_t begin, int64_t end) {
        while (begin < end) {
          const int64_t group = begin / blocks, first = begin % blocks, last = std::min(blocks, first + end - begin);
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

 private:
  int64_t count_;
  Scratch sums_;
};

// Calls function(args), with memory for what the kernels hold of a row, where they do.
template <class Args, class Function>
void with_held(const Args& args, const Function& function) {
  if constexpr (requires { args.held_rows(); }) {
    Scratch held(args.dtype, args.held_rows() * padded_cols(args.dtype, args.cols));
    Args own = args;
    own.held = held.data();
    function(own);
  } else {
    function(args);
  }
}

// The same with the scale, which a thread may convert for itself: scale.in(own) is it, in own = scale.own_memory() or
// elsewhere.
template <class Args, class Scale, class Function>
void with_scale(Args args, const Scale& scale, const Function& function) {
  Scratch own = scale.own_memory();
  args.scale = scale.in(own);
  with_held(args, function);
}

template <class Args, class Scale>
void run_forward(const ForwardKernels<Args>& kernels, const Args& args, const Scale& scale, int64_t rows) {
  if (!shares_rows(rows, args.cols)) {
    parallel_for(0, rows, grain(args.cols), [&](int64_t begin, int64_t end) {
      with_scale(args, scale, [&](const Args& args) { kernels.rows(args, begin, end); });
    });
    return;
  }
  with_scale(args, scale, [&](const Args& args) {
    SpanSums squares(args.cols);
    for (int64_t row = 0; row < rows; row++) {
      parallel_for(0, squares.count(), kGrainElements / kSpan,
                   [&](int64_t begin, int64_t end) { kernels.sums(args, row, begin, end, squares.data()); });
      const double square_sum = squares.total();
      parallel_for_columns(1, args.cols, kGrainElements, [&](int64_t, int64_t begin, int64_t end) {
        kernels.columns(args, row, square_sum, begin, end);
      });
    }
  });
}

template <class Args, class Scale>
void run_backward(const BackwardKernels<Args>& kernels, const Args& args, const Scale& scale) {
  if (!shares_rows(args.rows, args.cols)) {
    const int64_t parts = chunk_count(args.rows / args.groups, args.rows_per_chunk) * args.groups;
    parallel_for(0, parts, grain(args.rows_per_chunk * args.cols), [&](int64_t begin, int64_t end) {
      with_scale(args, scale, [&](const Args& args) { kernels.rows(args, begin, end); });
    });
    return;
  }
  with_scale(args, scale, [&](const Args& args) {
    SpanSums squares(args.cols), dots(args.cols);
    for (int64_t row = 0; row < args.rows; row++) {
      parallel_for(0, squares.count(), kGrainElements / kSpan, [&](int64_t begin, int64_t end) {
        kernels.sums(args, row, begin, end, squares.data(), dots.data());
      });
      const double square_sum = squares.total(), dot = dots.total();
      parallel_for_columns(1, args.cols, kGrainElements, [&](int64_t, int64_t begin, int64_t end) {
        kernels.columns(args, row, square_sum, dot, begin, end);
      });
    }
  });
}

}  // namespace normops::cpu
