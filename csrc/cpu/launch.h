// What the launchers on CPU tensors have in common: new memory, the scale, and how the kernels are to go about it.
#pragma once
#include <ATen/ops/empty_native.h>

#include <algorithm>

#include "../backend.h"
#include "../launch.h"
#include "huge_pages.h"
#include "isa.h"
#include "sharing.h"

namespace normops::cpu {

// What the operator templates need of a backend besides its launchers.
struct CpuBackend {
  struct Guard {
    explicit Guard(c10::Device) {}
  };
  static Tensor empty_contiguous(const OutputLike& like) {
    Tensor tensor = at::native::empty_cpu(like.sizes(), like.scalar_type());
    advise_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  }
};

// Registers the operators, if there are kernels to launch: without, CPU tensors get the composite as other devices do.
template <class Backend, class... Operators>
void register_kernels(torch::Library& m, List<Operators...> operators) {
  if (has_kernels()) register_all<BackendKernels<Backend>>(m, operators);
}

// weight + weight_offset as the kernels read it, or ones without a weight: the weight itself, where it is just that, or
// converted: by the threads together where it is long, and otherwise by each for itself, which is quicker than to fetch
// lines that another core has just written (8 x 4096 bfloat16, 2 threads of a Xeon: 5.5 us instead of 9.5).
class Scale {
 public:
  Scale(const Norm& norm, DType dtype, const Problem& problem) : Scale(norm, dtype, problem, {dtype, problem.cols}) {}

  Scale(const Norm& norm, DType dtype, const Problem& problem, const HeldOrder& order)
      : tensor_(is_given(norm.weight) ? norm.weight->expect_contiguous() : c10::MaybeOwned<Tensor>()),
        weight_(make_weight(*tensor_, norm, problem)),
        dtype_(dtype),
        problem_(problem),
        order_(order),
        conversion_(conversion()),
        shared_(dtype, conversion_ == Conversion::together ? count() : 0) {
    if (conversion_ != Conversion::together) return;
    parallel_for_columns(
        problem.groups, order.held_cols(), kGrainElements,
        [&](int64_t group, int64_t begin, int64_t end) noexcept { convert(shared_.data(), group, begin, end); });
  }

  const Weight& weight() const { return weight_; }

  // The numbers that a thread needs for itself, and the scale, which may be in its memory for them.
  int64_t own_count() const { return conversion_ == Conversion::each ? count() : 0; }
  const void* in(Scratch& own) const noexcept {
    if (conversion_ == Conversion::none) return weight_.data;
    if (conversion_ == Conversion::together) return shared_.data();
    for (int64_t group = 0; group < problem_.groups; group++) convert(own.data(), group, 0, order_.held_cols());
    return own.data();
  }

 private:
  enum class Conversion { none, together, each };

  Conversion conversion() const {
    if (weight_.data != nullptr && weight_.offset == 0 && weight_.dtype == dtype_ && compute_dtype(dtype_) == dtype_ &&
        order_.is_natural()) {
      return Conversion::none;
    }
    return problem_.groups * problem_.cols > kGrainElements ? Conversion::together : Conversion::each;
  }

  int64_t count() const { return problem_.groups * order_.held_cols(); }

  // What is held from `begin` to `end` of a group's.
  void convert(void* scale, int64_t group, int64_t begin, int64_t end) const noexcept {
    const int64_t bytes = size_of(compute_dtype(dtype_));
    char* const of_group = static_cast<char*>(scale) + group * order_.held_cols() * bytes;
    if (weight_.data != nullptr) {
      const char* const weight =
          static_cast<const char*>(weight_.data) + group * problem_.cols * size_of(weight_.dtype);
      order_.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
        rms_norm_kernels().scale(dtype_, weight_.dtype, weight + column * size_of(weight_.dtype), weight_.offset,
                                 of_group + held * bytes, count);
      });
    } else if (compute_dtype(dtype_) == DType::float64) {
      std::fill_n(reinterpret_cast<double*>(of_group) + begin, end - begin, 1.0);
    } else {
      std::fill_n(reinterpret_cast<float*>(of_group) + begin, end - begin, 1.0f);
    }
  }

  c10::MaybeOwned<Tensor> tensor_;
  Weight weight_;
  DType dtype_;
  const Problem& problem_;
  HeldOrder order_;
  Conversion conversion_;
  OwnScratch shared_;
};

// How the kernels are to go about it: whether so many tensors of the input's size fill the caches, so that nobody would
// find an output there.
template <class Args>
CpuArgs<Args> cpu_args(const Args& args, int64_t tensors) {
  // Not sysconf(_SC_LEVEL3_CACHE_SIZE): in virtual machines it may name ten times what there is.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  return {args, args.rows * args.cols * size_of(args.dtype) * tensors > kCacheBytes};
}

}  // namespace normops::cpu
