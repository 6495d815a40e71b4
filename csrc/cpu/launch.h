// What the launchers on CPU tensors have in common: memory, the scale, and how the rows of a forward are shared among
// threads.
#pragma once
#include <ATen/ops/empty_native.h>
#include <c10/util/SmallBuffer.h>

#include <algorithm>
#include <numeric>

#include "../check.h"
#include "../problem.h"
#include "huge_pages.h"
#include "parallel.h"
#include "rms_norm_kernel.h"

namespace normops::cpu {

// What the operator templates need of a backend besides its launchers.
struct CpuBackend {
  struct Guard {
    explicit Guard(c10::Device) {}
  };
  static Tensor empty_contiguous(const Tensor& like) {
    Tensor tensor = at::native::empty_cpu(like.sizes(), like.scalar_type());
    advise_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  }
};

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

 private:
  c10::SmallBuffer<double, 2048> buffer_;
};

// Shares a vector over the columns among the threads, in whole blocks.
template <class Function>
void parallel_for_columns(int64_t cols, int64_t grain_columns, const Function& function) {
  parallel_for(
      0, (cols + kLongestBlock - 1) / kLongestBlock, std::max<int64_t>(1, grain_columns / kLongestBlock),
      [&](int64_t begin, int64_t end) { function(begin * kLongestBlock, std::min(end * kLongestBlock, cols)); });
}

// weight + weight_offset as the kernels read it, or ones without a weight.
class Scale {
 public:
  Scale(const OptionalTensor& weight, double weight_offset, DType dtype, int64_t cols)
      : weight_(is_given(weight) ? weight->contiguous() : Tensor()),
        is_weight_itself_(weight_.defined() && weight_offset == 0 && dtype_of(weight_) == dtype &&
                          compute_dtype(dtype) == dtype && padded_cols(dtype, cols) == cols),
        converted_(dtype, is_weight_itself_ ? 0 : padded_cols(dtype, cols)) {
    if (is_weight_itself_) return;
    void* const target = converted_.data();
    if (weight_.defined()) {
      const auto convert = rms_norm_kernels().scale;
      parallel_for_columns(cols, kGrainElements, [&](int64_t begin, int64_t end) {
        convert(dtype, dtype_of(weight_), weight_.const_data_ptr(), weight_offset, target, begin, end);
      });
    } else if (compute_dtype(dtype) == DType::float64) {
      std::fill_n(static_cast<double*>(target), padded_cols(dtype, cols), 1.0);
    } else {
      std::fill_n(static_cast<float*>(target), padded_cols(dtype, cols), 1.0f);
    }
  }

  const void* data() { return is_weight_itself_ ? weight_.const_data_ptr() : converted_.data(); }

 private:
  Tensor weight_;
  bool is_weight_itself_;
  Scratch converted_;
};

// Whether threads share each row: there are fewer rows than threads, and a row is long enough to be worth it.
inline bool shares_rows(const Problem& problem) {
  return problem.cols >= 2 * kGrainElements && problem.rows < at::get_num_threads();
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

// Whether so many tensors of the input's size fill the caches, so that nobody would find an output there.
inline bool exceeds_caches(const Problem& problem, DType dtype, int64_t tensors) {
  // Not sysconf(_SC_LEVEL3_CACHE_SIZE): in virtual machines it may name ten times what there is.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t size = dispatch(dtype, []<class T>() -> int64_t { return sizeof(T); });
  return problem.rows * problem.cols * size * tensors > kCacheBytes;
}

inline RmsNormArgs forward_args(const Problem& problem, const Rows& x, const void* scale, const Target& y) {
  return {
      .dtype = dtype_of(x.tensor),
      .cols = problem.cols,
      .eps = problem.eps,
      .input = x.tensor.const_data_ptr(),
      .input_rows = x.layout,
      .scale = scale,
      .output = y.data(),
      .output_rows = y.layout(),
      .stream = exceeds_caches(problem, dtype_of(x.tensor), 2),
  };
}

template <class Args>
void run_forward(const ForwardKernels<Args>& kernels, const Args& args, const Problem& problem) {
  if (!shares_rows(problem)) {
    parallel_for(0, problem.rows, grain(problem.cols),
                 [&](int64_t begin, int64_t end) { kernels.rows(args, begin, end); });
    return;
  }
  SpanSums squares(problem.cols);
  for (int64_t row = 0; row < problem.rows; row++) {
    parallel_for(0, squares.count(), kGrainElements / kSpan,
                 [&](int64_t begin, int64_t end) { kernels.sums(args, row, begin, end, squares.data()); });
    const double square_sum = squares.total();
    parallel_for_columns(problem.cols, kGrainElements,
                         [&](int64_t begin, int64_t end) { kernels.columns(args, row, square_sum, begin, end); });
  }
}

}  // namespace normops::cpu
