// What the launchers of a backward have in common: its arguments, and grad_weight, of which kernels write partial sums.
#pragma once
#include <algorithm>
#include <cmath>

#include "../overlap.h"
#include "launch.h"

namespace normops::cpu {

// grad_weight is summed, for each group of the weight, within chunks of rows and then over the chunks. Chunks of about
// sqrt(rows) keep both sums, hence the bound on their rounding error, shortest; and as they depend on the number of
// rows alone, so do the bits of the result.
inline int64_t grad_weight_chunk_rows(int64_t rows) {
  constexpr int64_t kMultiple = 4;  // the kernel's row group
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(rows))));
  return (root + kMultiple - 1) / kMultiple * kMultiple;
}

// Without a scale and a gradient yet.
inline RmsNormBackwardArgs backward_args(const Problem& problem, const Rows& dy, const Rows& x) {
  return {
      .dtype = dtype_of(*x.tensor),
      .grad_output_dtype = dtype_of(*dy.tensor),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .grad_output = dy.tensor->const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .groups = problem.groups,
      .rows_per_chunk = grad_weight_chunk_rows(problem.rows / problem.groups),
      .stream = exceeds_caches(*x.tensor, 3),
  };
}

// Whether the partial of a single chunk can be formed in grad_weight itself: it is laid out in the same way, and is
// none of these inputs, which are read until the end.
inline bool is_partial_layout(const Tensor& grad_weight, DType dtype, int64_t cols,
                              c10::ArrayRef<const Tensor*> inputs) {
  return dtype_of(grad_weight) == dtype && compute_dtype(dtype) == dtype && grad_weight.is_contiguous() &&
         padded_cols(dtype, cols) == cols && std::all_of(inputs.begin(), inputs.end(), [&](const Tensor* input) {
           return overlap(grad_weight, *input) == Overlap::none;
         });
}

// The partials of a call, if grad_weight is defined, and their sum over the chunks. `inputs` are what the kernels read.
// What has no memory has none here, before a gradient is written over an input.
class PartialSums {
 public:
  PartialSums(const Problem& problem, int64_t rows_per_chunk, DType dtype, const Tensor& grad_weight,
              c10::ArrayRef<const Tensor*> inputs)
      : problem_(problem),
        dtype_(dtype),
        grad_weight_(grad_weight),
        chunks_(chunk_count(problem.rows / problem.groups, rows_per_chunk)),
        is_partial_(chunks_ == 1 && grad_weight.defined() &&
                    is_partial_layout(grad_weight, dtype, problem.cols, inputs)),
        partials_(dtype, grad_weight.defined() && !is_partial_
                             ? chunks_ * problem.groups * padded_cols(dtype, problem.cols)
                             : 0) {
    if (!grad_weight.defined()) return;
    sum_ = grad_weight.is_contiguous() ? grad_weight : CpuBackend::empty_contiguous(grad_weight);
    sum_data_ = sum_.mutable_data_ptr();
  }

  void* data() {
    if (!grad_weight_.defined()) return nullptr;
    return is_partial_ ? sum_data_ : partials_.data();
  }

  void finish() {
    if (!grad_weight_.defined() || is_partial_) return;
    const auto add_up = rms_norm_backward_kernels().grad_weight;
    const DType weight_dtype = dtype_of(sum_);
    parallel_for_columns(problem_.groups, problem_.cols, grain(chunks_),
                         [&](int64_t group, int64_t begin, int64_t end) noexcept {
                           add_up(dtype_, weight_dtype, partials_.data(), chunks_, problem_.groups, problem_.cols,
                                  sum_data_, group, begin, end);
                         });
    if (!sum_.is_same(grad_weight_)) grad_weight_.copy_(sum_);
  }

 private:
  const Problem& problem_;
  DType dtype_;
  const Tensor& grad_weight_;
  int64_t chunks_;
  bool is_partial_;
  OwnScratch partials_;
  Tensor sum_;  // contiguous: grad_weight itself, if it is
  void* sum_data_ = nullptr;
};

}  // namespace normops::cpu
