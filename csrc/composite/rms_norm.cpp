#include "rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>
#include <torch/library.h>

#include "../problem.h"

namespace normops {
namespace {

c10::DimVector dims_from(int64_t begin, int64_t end) {
  c10::DimVector dims;
  for (int64_t d = begin; d < end; d++) dims.push_back(d);
  return dims;
}

Tensor contiguous_or_undefined(const Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

Tensor rms_norm_fallback(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps, double weight_offset) {
  return rms_norm_composite(input, normalized_shape, weight, eps, weight_offset).contiguous();
}

Tensor& rms_norm_out_fallback(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                              std::optional<double> eps, double weight_offset, Tensor& out) {
  check_rms_norm_out(input, normalized_shape, weight, eps, out);
  return out.copy_(rms_norm_composite(input, normalized_shape, weight, eps, weight_offset));
}

Tensor& rms_norm_inplace_fallback(Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                  std::optional<double> eps, double weight_offset) {
  check_rms_norm_inplace(input, normalized_shape, weight, eps);
  return input.copy_(rms_norm_composite(input, normalized_shape, weight, eps, weight_offset));
}

std::tuple<Tensor, Tensor> rms_norm_backward_fallback(const Tensor& grad_output, const Tensor& input,
                                                      c10::SymIntArrayRef normalized_shape,
                                                      const OptionalTensor& weight, std::optional<double> eps,
                                                      double weight_offset, const OptionalTensor& grad_residual,
                                                      OutputMask output_mask) {
  const auto [grad_input, grad_weight] = rms_norm_backward_composite(grad_output, input, normalized_shape, weight, eps,
                                                                     weight_offset, grad_residual, output_mask);
  return {contiguous_or_undefined(grad_input), contiguous_or_undefined(grad_weight)};
}

std::tuple<Tensor&, Tensor&> rms_norm_backward_out_fallback(const Tensor& grad_output, const Tensor& input,
                                                            c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, std::optional<double> eps,
                                                            double weight_offset, const OptionalTensor& grad_residual,
                                                            OutputMask output_mask, Tensor& grad_input,
                                                            Tensor& grad_weight) {
  check_rms_norm_backward_out(grad_output, input, normalized_shape, weight, eps, grad_residual, output_mask, grad_input,
                              grad_weight);
  const auto [dx, dw] = rms_norm_backward_composite(grad_output, input, normalized_shape, weight, eps, weight_offset,
                                                    grad_residual, output_mask);
  if (dx.defined()) grad_input.copy_(dx);
  if (dw.defined()) grad_weight.copy_(dw);
  return {grad_input, grad_weight};
}

}  // namespace

Tensor to_compute_dtype(const Tensor& tensor, const Tensor& input) {
  return tensor.to(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Tensor mean_of_rows(const Tensor& tensor, int64_t normalized_dims) {
  return tensor.mean(dims_from(-normalized_dims, 0), /*keepdim=*/true);
}

Tensor sum_over_rows(const Tensor& tensor, const Tensor& weight) {
  const auto dims = dims_from(0, tensor.dim() - weight.dim());
  return dims.empty() ? tensor : tensor.sum(dims);  // a sum over no dimension would be one over all
}

Tensor rstd_of_rows(const Tensor& h, int64_t normalized_dims, double eps) {
  return at::rsqrt(mean_of_rows(h * h, normalized_dims) + eps);
}

Tensor rms_norm_composite(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                          std::optional<double> eps, double weight_offset) {
  check_rms_norm(input, normalized_shape, weight, eps);
  const Tensor h = to_compute_dtype(input, input);
  const auto normalized_dims = static_cast<int64_t>(normalized_shape.size());
  Tensor output = h * rstd_of_rows(h, normalized_dims, resolve_eps(eps, input.scalar_type()));
  if (is_given(weight)) output = output * (to_compute_dtype(*weight, input) + weight_offset);
  return output.to(input.scalar_type());
}

std::tuple<Tensor, Tensor> rms_norm_backward_composite(const Tensor& grad_output, const Tensor& input,
                                                       c10::SymIntArrayRef normalized_shape,
                                                       const OptionalTensor& weight, std::optional<double> eps,
                                                       double weight_offset, const OptionalTensor& grad_residual,
                                                       OutputMask output_mask) {
  check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
  const auto normalized_dims = static_cast<int64_t>(normalized_shape.size());
  const Tensor h = to_compute_dtype(input, input);
  const Tensor dy = to_compute_dtype(grad_output, input);
  const Tensor rstd = rstd_of_rows(h, normalized_dims, resolve_eps(eps, input.scalar_type()));
  const Tensor h_hat = h * rstd;

  Tensor grad_input, grad_weight;
  if (output_mask[0]) {
    const Tensor g = is_given(weight) ? dy * (to_compute_dtype(*weight, input) + weight_offset) : dy;
    grad_input = rstd * (g - h_hat * mean_of_rows(g * h_hat, normalized_dims));
    if (is_given(grad_residual)) grad_input = grad_input + to_compute_dtype(*grad_residual, input);
    grad_input = grad_input.to(input.scalar_type());
  }
  if (output_mask[1] && is_given(weight)) {
    grad_weight = sum_over_rows(dy * h_hat, *weight).to(weight->scalar_type());
  }
  return {grad_input, grad_weight};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_fallback);
  m.impl("rms_norm.out", rms_norm_out_fallback);
  m.impl("rms_norm_", rms_norm_inplace_fallback);
  m.impl("rms_norm_backward", rms_norm_backward_fallback);
  m.impl("rms_norm_backward.out", rms_norm_backward_out_fallback);
}

}  // namespace normops
