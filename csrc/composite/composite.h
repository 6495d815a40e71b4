// Building blocks for the definitions of all operators in ATen operators. Forward mode, higher derivatives and devices
// without a kernel run the definition composite(arguments), on arguments that passed the check.
#pragma once
#include "../operator.h"
#include "../rms_norm_rope.h"

namespace normops {

// Converts `tensor` to the compute dtype of input. An undefined tensor stays undefined.
Tensor to_compute_dtype(const Tensor& tensor, const Tensor& input);

// The sum of two terms, and the product with a factor, where an undefined tensor is zero.
Tensor plus(const Tensor& a, const Tensor& b);
Tensor times(const Tensor& a, const Tensor& factor);

// Sums over the last `normalized_dims` dimensions.
Tensor sum_each_row(const Tensor& tensor, int64_t normalized_dims);

// Rounds `tensor` to `dtype` if `is_wanted`. The result keeps the dtype of `tensor`.
Tensor round_to(const Tensor& tensor, at::ScalarType dtype, bool is_wanted);

// Returns rms_norm of h, an input or an intermediate result in the compute dtype, for an output of `dtype`. The caller
// rounds the result.
Tensor normalize(const Tensor& h, const Norm& norm, at::ScalarType dtype);

// The same with a known rstd.
Tensor normalize(const Tensor& h, const Tensor& rstd, const Norm& norm, at::ScalarType dtype);

// Returns dy times the weight, the gradient of the normalized input, rounded as the norm rounds that.
Tensor grad_normalized(const Tensor& dy, const Norm& norm, at::ScalarType dtype);

// Returns the gradient of the weight, which must be given.
Tensor gradient_of_weight(const Tensor& dy, const Tensor& h_hat, const Norm& norm, at::ScalarType dtype);

// Adds grad_residual to a gradient in the compute dtype, if this is defined. Returns the sum in the dtype of input.
Tensor as_grad_input(const Tensor& gradient, const OptionalTensor& grad_residual, const Tensor& input);

// The backward of normalize(), for dy in the compute dtype. Returns the unrounded gradient of h and that of the weight.
std::tuple<Tensor, Tensor> normalize_backward(const Tensor& dy, const Tensor& h, const Norm& norm, at::ScalarType dtype,
                                              const std::array<bool, 2>& output_mask);

// The derivative of normalize_backward() without rounding, for the gradients `for_input` of its first result and
// `for_weight` of its second one, either of which may be undefined. docs/derivation.md derives the formulas.
struct SecondGradients {
  Tensor of_dy;  // this is also the tangent of normalize() in the direction (for_input, for_weight)
  Tensor of_h;
  Tensor of_weight;
};
SecondGradients normalize_backward_backward(const Tensor& for_input, const Tensor& for_weight, const Tensor& dy,
                                            const Tensor& h, const Norm& norm);

// The activation of a tensor in the compute dtype, its slope and its curvature: the first and the second derivative.
Tensor activate(const Tensor& gate, Activation activation);
Tensor activation_slope(const Tensor& gate, Activation activation);
Tensor activation_curvature(const Tensor& gate, Activation activation);

// The rotation of rows, and its transpose, which rotates gradients back. All tensors have the same dtype.
Tensor rotate(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope);
Tensor rotate_back(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope);

// Appends the dimensions of a row, with size 1, to a tensor with one number for each row.
Tensor unsqueeze_to_rows(Tensor numbers, size_t normalized_dims);

// 1 / sqrt(square_sum / size + eps)
Tensor rstd_of_sums(const Tensor& square_sum, const c10::SymInt& size, const Norm& norm);

}  // namespace normops
