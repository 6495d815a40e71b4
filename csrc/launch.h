// How the launchers of every device lay out the arguments of an operator for its kernels.
#pragma once
#include "kernel_args.h"
#include "operator.h"
#include "problem.h"
#include "rms_norm_rope.h"

namespace normops {

// The tensor keeps the memory.
inline Weight make_weight(const Tensor& contiguous, const Norm& norm, const Problem& problem) {
  if (!contiguous.defined()) return {nullptr, DType::float32, 0.0, problem.groups};
  return {contiguous.const_data_ptr(), dtype_of(contiguous), norm.weight_offset, problem.groups};
}

inline RmsNormArgs forward_args(const Problem& problem, const Rows& x, const Weight& weight, const Target& y) {
  return {
      .dtype = dtype_of(*x.tensor),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = weight,
      .casting = problem.casting,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .output = y.data(),
      .output_rows = y.layout(),
  };
}

inline RmsNormStatsArgs stats_args(const Rows& x, size_t normalized_dims, const Target& square_sum) {
  const Tensor& input = *x.tensor;
  const int64_t cols = c10::multiply_integers(input.sizes().slice(input.dim() - normalized_dims));
  return {
      .dtype = dtype_of(input),
      .rows = input.numel() / cols,
      .cols = cols,
      .input = input.const_data_ptr(),
      .input_rows = x.layout,
      .square_sum = square_sum.data(),
      .square_sum_rows = square_sum.layout(),
  };
}

// Without what not every backward has, and without what it writes.
inline RmsNormBackwardArgs backward_args(const Problem& problem, const Rows& dy, const Rows& x, const Weight& weight) {
  return {
      .dtype = dtype_of(*x.tensor),
      .grad_output_dtype = dtype_of(*dy.tensor),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = weight,
      .casting = problem.casting,
      .grad_output = dy.tensor->const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
  };
}

// Has a kernel read a tensor that may not be given; the rows keep its memory.
inline Rows read_if_given(const OptionalTensor& tensor, size_t normalized_dims, const void*& data, RowLayout& layout) {
  Rows rows;
  if (is_given(tensor)) {
    rows = make_rows(*tensor, normalized_dims);
    data = rows.tensor->const_data_ptr();
    layout = rows.layout;
  }
  return rows;
}

// Has a kernel write a gradient that may not be wanted, which is undefined then.
inline std::optional<Target> write_if_wanted(const Tensor& gradient, size_t normalized_dims, void*& data,
                                             RowLayout& layout) {
  if (!gradient.defined()) return std::nullopt;
  std::optional<Target> target(std::in_place, gradient, normalized_dims);
  data = target->data();
  layout = target->layout();
  return target;
}

// cos and sin, whose rows broadcast over those of the input and lie alike.
class Tables {
 public:
  Tables(const Tensor& input, const Tensor& cos, const Tensor& sin, int max_dims = RowLayout::kMaxDims) {
    const bool are_alike = cos.strides() == sin.strides();
    cos_ = make_rows(over_rows(input, are_alike ? cos : cos.contiguous()), 1, max_dims);
    sin_ = make_rows(over_rows(input, are_alike ? sin : sin.contiguous()), 1, max_dims);
  }

  const Tensor& cos() const { return *cos_.tensor; }
  const Tensor& sin() const { return *sin_.tensor; }
  const RowLayout& rows() const { return cos_.layout; }

 private:
  static Tensor over_rows(const Tensor& input, const Tensor& table) {
    c10::DimVector sizes(input.sizes());
    sizes.back() = table.size(-1);
    return table.expand(sizes);
  }

  Rows cos_, sin_;
};

inline Rotation make_rotation(const Tables& tables, const Rope& rope) {
  const int64_t columns = tables.cos().size(-1), pairs = rope.rotary_dim.value_or(columns) / 2;
  return {
      .interleaved = rope.interleaved,
      .angle_of_pair = columns == pairs,
      .dtype = dtype_of(tables.cos()),
      .offset = rope.rotary_offset,
      .pairs = pairs,
      .cos = tables.cos().const_data_ptr(),
      .sin = tables.sin().const_data_ptr(),
      .rows = tables.rows(),
  };
}

}  // namespace normops
