// What the launchers on CPU tensors have in common: new memory, the scale, and the arguments of a forward.
#pragma once
#include <ATen/ops/empty_native.h>

#include <algorithm>

#include "../operator.h"
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

// weight + weight_offset as the kernels read it, or ones without a weight: the weight itself, where it is just that, or
// converted: by the threads together where it is long, and otherwise by each for itself, which is quicker than to fetch
// lines that another core has just written (8 x 4096 bfloat16, 2 threads of a Xeon: 5.5 us instead of 9.5).
class Scale {
 public:
  Scale(const Norm& norm, DType dtype, const Problem& problem)
      : weight_(is_given(norm.weight) ? norm.weight->expect_contiguous() : c10::MaybeOwned<Tensor>()),
        data_(weight_->defined() ? weight_->const_data_ptr() : nullptr),
        weight_dtype_(weight_->defined() ? dtype_of(*weight_) : dtype),
        weight_offset_(norm.weight_offset),
        dtype_(dtype),
        problem_(problem),
        conversion_(conversion()),
        shared_(dtype, conversion_ == Conversion::together ? count() : 0) {
    if (conversion_ != Conversion::together) return;
    parallel_for_columns(
        problem.groups, problem.cols, kGrainElements,
        [&](int64_t group, int64_t begin, int64_t end) noexcept { convert(shared_.data(), group, begin, end); });
  }

  // The numbers that a thread needs for itself, and the scale, which may be in its memory for them.
  int64_t own_count() const { return conversion_ == Conversion::each ? count() : 0; }
  const void* in(Scratch& own) const noexcept {
    if (conversion_ == Conversion::none) return data_;
    if (conversion_ == Conversion::together) return shared_.data();
    for (int64_t group = 0; group < problem_.groups; group++) convert(own.data(), group, 0, problem_.cols);
    return own.data();
  }

 private:
  enum class Conversion { none, together, each };

  Conversion conversion() const {
    if (data_ != nullptr && weight_offset_ == 0 && weight_dtype_ == dtype_ && compute_dtype(dtype_) == dtype_ &&
        padded_cols(dtype_, problem_.cols) == problem_.cols) {
      return Conversion::none;
    }
    return problem_.groups * problem_.cols > kGrainElements ? Conversion::together : Conversion::each;
  }

  int64_t count() const { return problem_.groups * padded_cols(dtype_, problem_.cols); }

  void convert(void* scale, int64_t group, int64_t begin, int64_t end) const noexcept {
    if (data_ != nullptr) {
      rms_norm_kernels().scale(dtype_, weight_dtype_, data_, weight_offset_, problem_.cols, scale, group, begin, end);
    } else if (compute_dtype(dtype_) == DType::float64) {
      std::fill_n(static_cast<double*>(scale) + begin, padded_cols(dtype_, end - begin), 1.0);
    } else {
      std::fill_n(static_cast<float*>(scale) + begin, padded_cols(dtype_, end - begin), 1.0f);
    }
  }

  c10::MaybeOwned<Tensor> weight_;
  const void* data_;  // null without a weight
  DType weight_dtype_;
  double weight_offset_;
  DType dtype_;
  const Problem& problem_;
  Conversion conversion_;
  OwnScratch shared_;
};

// Whether so many tensors of the input's size fill the caches, so that nobody would find an output there.
inline bool exceeds_caches(const Tensor& input, int64_t tensors) {
  // Not sysconf(_SC_LEVEL3_CACHE_SIZE): in virtual machines it may name ten times what there is.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  return static_cast<int64_t>(input.nbytes()) * tensors > kCacheBytes;
}

// Without a scale yet.
inline RmsNormArgs forward_args(const Problem& problem, const Rows& x, const Target& y) {
  return {
      .dtype = dtype_of(*x.tensor),
      .cols = problem.cols,
      .eps = problem.eps,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .groups = problem.groups,
      .output = y.data(),
      .output_rows = y.layout(),
      .stream = exceeds_caches(*x.tensor, 2),
  };
}

}  // namespace normops::cpu
