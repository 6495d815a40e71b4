#include "../rms_norm_stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>

#include "../tensor_rows.h"
#include "composite.h"
#include "kernels.h"

namespace normops {

Tensor unsqueeze_to_rows(Tensor numbers, size_t normalized_dims) {
  for (size_t d = 0; d < normalized_dims; d++) numbers = numbers.unsqueeze(-1);
  return numbers;
}

Tensor rstd_of_sums(const Tensor& square_sum, const c10::SymInt& size, const Norm& norm) {
  return at::rsqrt(square_sum / c10::Scalar(size) + resolve_eps(norm.eps, square_sum.scalar_type()));
}

Tensor composite(const RmsNormStats& arguments) {
  const auto& [input, normalized_shape] = arguments;
  const Tensor h = to_compute_dtype(input, input);
  return sum_each_row(h * h, normalized_shape.size());
}

Tensor composite(const RmsNormFromStats& arguments) {
  const auto& [input, square_sum, norm, size] = arguments;
  const Tensor h = to_compute_dtype(input, input);
  const Tensor rstd = unsqueeze_to_rows(rstd_of_sums(square_sum, size, norm), norm.dims());
  return normalize(h, rstd, norm, input.scalar_type()).to(input.scalar_type());
}

std::tuple<Tensor, Tensor> composite(const RmsNormBackwardStats& arguments) {
  const auto& [grad_output, input, norm] = arguments;
  const Tensor dy = to_compute_dtype(grad_output, input), h = to_compute_dtype(input, input);
  const Tensor g = grad_normalized(dy, norm, grad_output.scalar_type());
  return {sum_each_row(h * h, norm.dims()), sum_each_row(g * h, norm.dims())};
}

std::tuple<Tensor, Tensor> composite(const RmsNormBackwardFromStats& arguments) {
  const auto& [grad_output, input, square_sum, dot, norm, grad_residual, output_mask, size] = arguments;
  const at::ScalarType dtype = grad_output.scalar_type();
  const Tensor dy = to_compute_dtype(grad_output, input), h = to_compute_dtype(input, input);
  const Tensor rstd = unsqueeze_to_rows(rstd_of_sums(square_sum, size, norm), norm.dims());
  const Tensor h_hat = h * rstd;
  Tensor grad_input, grad_weight;
  if (output_mask[0]) {
    const Tensor mean = unsqueeze_to_rows(dot / c10::Scalar(size), norm.dims()) * rstd;
    grad_input = as_grad_input(rstd * (grad_normalized(dy, norm, dtype) - h_hat * mean), grad_residual, input);
  }
  if (output_mask[1] && is_given(norm.weight)) grad_weight = gradient_of_weight(dy, h_hat, norm, dtype);
  return {grad_input, grad_weight};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  register_all<Composite>(m, List<RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>());
}

}  // namespace normops
