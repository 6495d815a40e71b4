#include "../rms_norm.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>

#include "../tensor_rows.h"
#include "composite.h"
#include "kernels.h"

namespace normops {
namespace {

c10::DimVector dims_from(int64_t begin, int64_t end) {
  c10::DimVector dims;
  for (int64_t d = begin; d < end; d++) dims.push_back(d);
  return dims;
}

// Returns the mean over the last `normalized_dims` dimensions, which are kept with size 1. Avoids at::mean, as DTensor
// cannot combine the means over shards of different sizes.
Tensor mean_of_rows(const Tensor& tensor, int64_t normalized_dims) {
  const auto sizes = tensor.sym_sizes();
  const c10::SymInt size = c10::multiply_integers(sizes.slice(sizes.size() - normalized_dims));
  return tensor.sum(dims_from(-normalized_dims, 0), /*keepdim=*/true) / c10::Scalar(size);
}

// Sums over the dimensions that `weight` broadcasts over.
Tensor reduce_to_weight(const Tensor& tensor, const Tensor& weight) { return at::sum_to(tensor, weight.sym_sizes()); }

// 1 / sqrt(mean(h^2) + eps)
Tensor rstd_of_rows(const Tensor& h, int64_t normalized_dims, double eps) {
  return at::rsqrt(mean_of_rows(h * h, normalized_dims) + eps);
}

// Multiplies `tensor` by weight + weight_offset.
Tensor times_weight(const Tensor& tensor, const Norm& norm) {
  if (!is_given(norm.weight)) return tensor;
  const Tensor weight = to_compute_dtype(*norm.weight, tensor);
  return tensor * (norm.weight_offset == 0 ? weight : weight + norm.weight_offset);  // -0 + 0 is 0
}

}  // namespace

Tensor to_compute_dtype(const Tensor& tensor, const Tensor& input) {
  return tensor.defined() ? tensor.to(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat) : tensor;
}

Tensor plus(const Tensor& a, const Tensor& b) { return !a.defined() ? b : b.defined() ? a + b : a; }
Tensor times(const Tensor& a, const Tensor& factor) { return a.defined() ? a * factor : a; }

Tensor sum_each_row(const Tensor& tensor, int64_t normalized_dims) {
  return tensor.sum(dims_from(-normalized_dims, 0));
}

Tensor round_to(const Tensor& tensor, at::ScalarType dtype, bool is_wanted) {
  return is_wanted ? tensor.to(dtype).to(tensor.scalar_type()) : tensor;
}

Tensor normalize(const Tensor& h, const Norm& norm, at::ScalarType dtype) {
  return normalize(h, rstd_of_rows(h, norm.dims(), resolve_eps(norm.eps, h.scalar_type())), norm, dtype);
}

Tensor normalize(const Tensor& h, const Tensor& rstd, const Norm& norm, at::ScalarType dtype) {
  return times_weight(round_to(h * rstd, dtype, norm.parsed_rounding().normalized), norm);
}

Tensor grad_normalized(const Tensor& dy, const Norm& norm, at::ScalarType dtype) {
  return round_to(times_weight(dy, norm), dtype, is_given(norm.weight) && norm.parsed_rounding().normalized);
}

Tensor gradient_of_weight(const Tensor& dy, const Tensor& h_hat, const Norm& norm, at::ScalarType dtype) {
  const auto cast = [&](const Tensor& tensor) { return round_to(tensor, dtype, norm.parsed_rounding().normalized); };
  return reduce_to_weight(cast(dy * cast(h_hat)), *norm.weight).to(norm.weight->scalar_type());
}

std::tuple<Tensor, Tensor> normalize_backward(const Tensor& dy, const Tensor& h, const Norm& norm, at::ScalarType dtype,
                                              const std::array<bool, 2>& output_mask) {
  const Tensor rstd = rstd_of_rows(h, norm.dims(), resolve_eps(norm.eps, h.scalar_type()));
  const Tensor h_hat = h * rstd;
  Tensor grad_input, grad_weight;
  if (output_mask[0]) {
    const Tensor g = grad_normalized(dy, norm, dtype);
    grad_input = rstd * (g - h_hat * mean_of_rows(g * h_hat, norm.dims()));
  }
  if (output_mask[1] && is_given(norm.weight)) grad_weight = gradient_of_weight(dy, h_hat, norm, dtype);
  return {grad_input, grad_weight};
}

SecondGradients normalize_backward_backward(const Tensor& for_input, const Tensor& for_weight, const Tensor& dy,
                                            const Tensor& h, const Norm& norm) {
  const Tensor rstd = rstd_of_rows(h, norm.dims(), resolve_eps(norm.eps, h.scalar_type()));
  const Tensor h_hat = h * rstd;
  const auto mean = [&](const Tensor& tensor) { return mean_of_rows(tensor, norm.dims()); };
  // The derivative of h_hat in a direction, a symmetric map.
  const auto project = [&](const Tensor& u) { return rstd * (u - h_hat * mean(u * h_hat)); };
  SecondGradients result;
  if (for_input.defined()) {
    const Tensor &u = for_input, projected = project(u), g = times_weight(dy, norm);
    const Tensor mean_g = mean(g * h_hat), mean_u = mean(u * h_hat);
    result.of_dy = times_weight(projected, norm);
    result.of_h = -(rstd * rstd) * (h_hat * (mean(u * g) - 3 * mean_g * mean_u) + u * mean_g + g * mean_u);
    if (is_given(norm.weight)) result.of_weight = reduce_to_weight(dy * projected, *norm.weight);
  }
  if (for_weight.defined()) {
    result.of_dy = plus(result.of_dy, for_weight * h_hat);
    result.of_h = plus(result.of_h, project(for_weight * dy));
  }
  return result;
}

Tensor as_grad_input(const Tensor& gradient, const OptionalTensor& grad_residual, const Tensor& input) {
  if (!gradient.defined()) return gradient;
  const Tensor sum = is_given(grad_residual) ? gradient + to_compute_dtype(*grad_residual, input) : gradient;
  return sum.to(input.scalar_type());
}

Tensor composite(const RmsNorm& arguments) {
  const auto& [input, norm, bias] = arguments;
  const at::ScalarType dtype = input.scalar_type();
  const Tensor normed = normalize(to_compute_dtype(input, input), norm, dtype);
  if (!is_given(bias)) return normed.to(dtype);
  return (round_to(normed, dtype, norm.parsed_rounding().multiplied) + to_compute_dtype(*bias, input)).to(dtype);
}

std::tuple<Tensor, Tensor, Tensor> composite(const RmsNormBackward& arguments) {
  const auto& [grad_output, input, norm, grad_residual, bias, output_mask] = arguments;
  const auto& [wants_input, wants_weight, wants_bias] = output_mask;
  if (arguments.uses_bias()) {  // the other gradients do not depend on bias, and may have a kernel
    const RmsNormBackward without = {grad_output,   input,        norm,
                                     grad_residual, std::nullopt, {wants_input, wants_weight, false}};
    auto gradients = wants_input || wants_weight ? call(without) : Outputs<RmsNormBackward>();
    const Tensor sum = reduce_to_weight(to_compute_dtype(grad_output, input), *bias);
    return {gradients[0], gradients[1], sum.to(bias->scalar_type(), /*non_blocking=*/false, /*copy=*/true)};
  }
  const auto [grad_input, grad_weight] =
      normalize_backward(to_compute_dtype(grad_output, input), to_compute_dtype(input, input), norm,
                         grad_output.scalar_type(), {wants_input, wants_weight});
  return {as_grad_input(grad_input, grad_residual, input), grad_weight, Tensor()};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  register_all<Composite>(m, List<RmsNorm, RmsNormBackward>());
}

}  // namespace normops
