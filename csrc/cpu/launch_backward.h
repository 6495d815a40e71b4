// What the launchers of a backward have in common: its arguments, and grad_weight, of which kernels write partial sums.
#pragma once
#include <cmath>

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

template <class Args>
CpuArgs<Args> cpu_backward_args(const Args& args, int64_t tensors) {
  CpuArgs<Args> result = cpu_args(args, tensors);
  result.rows_per_chunk = grad_weight_chunk_rows(args.rows / args.weight.groups);
  return result;
}

// The partials of a call, if grad_weight is defined, and their sum over the chunks. What has no memory has none here,
// before a gradient is written over an input.
class PartialSums {
 public:
  PartialSums(const Problem& problem, int64_t rows_per_chunk, DType dtype, const Tensor& grad_weight)
      : PartialSums(problem, rows_per_chunk, dtype, grad_weight, {dtype, problem.cols}) {}

  PartialSums(const Problem& problem, int64_t rows_per_chunk, DType dtype, const Tensor& grad_weight,
              const HeldOrder& order)
      : problem_(problem),
        dtype_(dtype),
        grad_weight_(grad_weight),
        order_(order),
        chunks_(chunk_count(problem.rows / problem.groups, rows_per_chunk)),
        partials_(dtype, grad_weight.defined() ? chunks_ * problem.groups * order.held_cols() : 0) {
    if (!grad_weight.defined()) return;
    sum_ = grad_weight.is_contiguous() ? grad_weight : CpuBackend::empty_contiguous(&grad_weight);
    sum_data_ = sum_.mutable_data_ptr();
  }

  void* data() { return grad_weight_.defined() ? partials_.data() : nullptr; }

  void finish() {
    if (!grad_weight_.defined()) return;
    const auto add_up = rms_norm_backward_kernels().grad_weight;
    const DType weight_dtype = dtype_of(sum_);
    const int64_t stride = problem_.groups * order_.held_cols();
    parallel_for_columns(
        problem_.groups, order_.held_cols(), grain(chunks_), [&](int64_t group, int64_t begin, int64_t end) noexcept {
          const char* const of_group =
              static_cast<const char*>(partials_.data()) + group * order_.held_cols() * size_of(compute_dtype(dtype_));
          char* const sum = static_cast<char*>(sum_data_) + group * problem_.cols * size_of(weight_dtype);
          order_.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
            add_up(dtype_, weight_dtype, of_group + held * size_of(compute_dtype(dtype_)), chunks_, stride,
                   sum + column * size_of(weight_dtype), count);
          });
        });
    if (!sum_.is_same(grad_weight_)) grad_weight_.copy_(sum_);
  }

 private:
  const Problem& problem_;
  DType dtype_;
  const Tensor& grad_weight_;
  HeldOrder order_;
  int64_t chunks_;
  OwnScratch partials_;
  Tensor sum_;  // contiguous: grad_weight itself, if it is
  void* sum_data_ = nullptr;
};

}  // namespace normops::cpu
