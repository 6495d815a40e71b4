// What the launchers on CPU tensors have in common: new memory, the scale, and the arguments of a forward.
#pragma once
#include <ATen/ops/empty_native.h>

#include <algorithm>

#include "../check.h"
#include "../problem.h"
#include "huge_pages.h"
#include "sharing.h"

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

// weight + weight_offset as the kernels read it, or ones without a weight.
class Scale {
 public:
  Scale(const OptionalTensor& weight, double weight_offset, DType dtype, const Problem& problem)
      : weight_(is_given(weight) ? weight->expect_contiguous() : c10::MaybeOwned<Tensor>()),
        is_weight_itself_(weight_->defined() && weight_offset == 0 && dtype_of(*weight_) == dtype &&
                          compute_dtype(dtype) == dtype && padded_cols(dtype, problem.cols) == problem.cols),
        converted_(dtype, is_weight_itself_ ? 0 : problem.groups * padded_cols(dtype, problem.cols)) {
    if (is_weight_itself_) return;
    void* const target = converted_.data();
    const int64_t cols = problem.cols;
    if (weight_->defined()) {
      const auto convert = rms_norm_kernels().scale;
      parallel_for_columns(problem.groups, cols, kGrainElements, [&](int64_t group, int64_t begin, int64_t end) {
        convert(dtype, dtype_of(*weight_), weight_->const_data_ptr(), weight_offset, cols, target, group, begin, end);
      });
    } else if (compute_dtype(dtype) == DType::float64) {
      std::fill_n(static_cast<double*>(target), padded_cols(dtype, cols), 1.0);
    } else {
      std::fill_n(static_cast<float*>(target), padded_cols(dtype, cols), 1.0f);
    }
  }

  const void* data() { return is_weight_itself_ ? weight_->const_data_ptr() : converted_.data(); }

 private:
  c10::MaybeOwned<Tensor> weight_;
  bool is_weight_itself_;
  Scratch converted_;
};

// Whether so many tensors of the input's size fill the caches, so that nobody would find an output there.
inline bool exceeds_caches(const Tensor& input, int64_t tensors) {
  // Not sysconf(_SC_LEVEL3_CACHE_SIZE): in virtual machines it may name ten times what there is.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  return static_cast<int64_t>(input.nbytes()) * tensors > kCacheBytes;
}

inline RmsNormArgs forward_args(const Problem& problem, const Rows& x, const void* scale, const Target& y) {
  return {
      .dtype = dtype_of(*x.tensor),
      .cols = problem.cols,
      .eps = problem.eps,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .scale = scale,
      .groups = problem.groups,
      .output = y.data(),
      .output_rows = y.layout(),
      .stream = exceeds_caches(*x.tensor, 2),
  };
}

}  // namespace normops::cpu
