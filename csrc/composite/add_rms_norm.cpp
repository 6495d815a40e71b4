#include "add_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "rms_norm.h"

namespace normops {
namespace {

std::tuple<Tensor, Tensor> add_rms_norm_fallback(const Tensor& input, const Tensor& residual,
                                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                 std::optional<double> eps, double weight_offset) {
  const auto [output, residual_out] =
      add_rms_norm_composite(input, residual, normalized_shape, weight, eps, weight_offset);
  return {output.contiguous(), residual_out.contiguous()};
}

std::tuple<Tensor&, Tensor&> add_rms_norm_out_fallback(const Tensor& input, const Tensor& residual,
                                                       c10::SymIntArrayRef normalized_shape,
                                                       const OptionalTensor& weight, std::optional<double> eps,
                                                       double weight_offset, Tensor& out, Tensor& residual_out) {
  check_add_rms_norm_out(input, residual, normalized_shape, weight, eps, out, residual_out);
  const auto [y, h] = add_rms_norm_composite(input, residual, normalized_shape, weight, eps, weight_offset);
  return {out.copy_(y), residual_out.copy_(h)};
}

void add_rms_norm_inplace_fallback(Tensor& input, Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                   const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
  check_add_rms_norm_inplace(input, residual, normalized_shape, weight, eps);
  const auto [y, h] = add_rms_norm_composite(input, residual, normalized_shape, weight, eps, weight_offset);
  input.copy_(y);
  residual.copy_(h);
}

}  // namespace

std::tuple<Tensor, Tensor> add_rms_norm_composite(const Tensor& input, const Tensor& residual,
                                                  c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                  std::optional<double> eps, double weight_offset) {
  check_add_rms_norm(input, residual, normalized_shape, weight, eps);
  const Tensor sum = to_compute_dtype(input, input) + to_compute_dtype(residual, input);
  const Tensor residual_out = sum.to(residual.scalar_type());
  const Tensor h = to_compute_dtype(residual_out, input);
  const Tensor output = rms_norm_composite(h, normalized_shape, weight, eps, weight_offset);
  return {output.to(input.scalar_type()), residual_out};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  m.impl("add_rms_norm", add_rms_norm_fallback);
  m.impl("add_rms_norm.out", add_rms_norm_out_fallback);
  m.impl("add_rms_norm_", add_rms_norm_inplace_fallback);
}

}  // namespace normops
