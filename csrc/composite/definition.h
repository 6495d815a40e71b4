// Pieces of the definitions of all operators, in ATen operators. A definition, composite(arguments), is what forward
// mode, higher derivatives and devices without a kernel run, on arguments that passed the check.
#pragma once
#include "../operator.h"

namespace normops {

// `tensor` in the type that input's dtype is computed in.
Tensor to_compute_dtype(const Tensor& tensor, const Tensor& input);

// Sum over the last `normalized_dims` dimensions.
Tensor sum_each_row(const Tensor& tensor, int64_t normalized_dims);

// `tensor`, rounded to `dtype` if that is asked for.
Tensor round_to(const Tensor& tensor, at::ScalarType dtype, bool is_wanted);

// rms_norm of rows in the compute dtype, for an output of `dtype`, which is left to round: that is all but the end of
// the norm of an input that is a result itself.
Tensor normalize(const Tensor& h, const Norm& norm, at::ScalarType dtype);

// The same, where rstd is known.
Tensor normalize(const Tensor& h, const Tensor& rstd, const Norm& norm, at::ScalarType dtype);

// dy times the weight, rounded as the norm rounds.
Tensor grad_normalized(const Tensor& dy, const Norm& norm, at::ScalarType dtype);

// The gradient of the weight, which there is.
Tensor gradient_of_weight(const Tensor& dy, const Tensor& h_hat, const Norm& norm, at::ScalarType dtype);

// A gradient in the compute dtype, if it is wanted, and that of the residual stream, in the dtype of input.
Tensor as_grad_input(const Tensor& gradient, const OptionalTensor& grad_residual, const Tensor& input);

// Its backward, for a gradient in the compute dtype: that of h, which is left to round, and that of the weight.
std::tuple<Tensor, Tensor> normalize_backward(const Tensor& dy, const Tensor& h, const Norm& norm, at::ScalarType dtype,
                                              const std::array<bool, 2>& output_mask);

// The activation of a tensor in the compute dtype, and its slope: with s the sigmoid, that of s is s (1 - s).
Tensor activate(const Tensor& gate, Activation activation);
Tensor activation_slope(const Tensor& gate, Activation activation);

// Numbers of rows with the dimensions of a row, of size 1.
Tensor unsqueeze_to_rows(Tensor numbers, size_t normalized_dims);

// 1 / sqrt(mean of squares + eps)
Tensor rstd_of_sums(const Tensor& square_sum, const c10::SymInt& size, const Norm& norm);

}  // namespace normops
