// Shapes, dtypes and strides of add_rms_norm.
#include <torch/library.h>

#include "../add_rms_norm.h"
#include "empty.h"

namespace normops {
namespace {

std::tuple<Tensor, Tensor> add_rms_norm_meta(const Tensor& input, const Tensor& residual,
                                             c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                             std::optional<double> eps, double) {
  check_add_rms_norm(input, residual, normalized_shape, weight, eps);
  return {empty_like_contiguous(input), empty_like_contiguous(residual)};
}

std::tuple<Tensor&, Tensor&> add_rms_norm_out_meta(const Tensor& input, const Tensor& residual,
                                                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                   std::optional<double> eps, double, Tensor& out,
                                                   Tensor& residual_out) {
  check_add_rms_norm_out(input, residual, normalized_shape, weight, eps, out, residual_out);
  return {out, residual_out};
}

void add_rms_norm_inplace_meta(Tensor& input, Tensor& residual, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps, double) {
  check_add_rms_norm_inplace(input, residual, normalized_shape, weight, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Meta, m) {
  m.impl("add_rms_norm", add_rms_norm_meta);
  m.impl("add_rms_norm.out", add_rms_norm_out_meta);
  m.impl("add_rms_norm_", add_rms_norm_inplace_meta);
}

}  // namespace normops
