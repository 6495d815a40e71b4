// Shapes, dtypes and strides of rms_norm and rms_norm_backward: fake tensors, torch.export and device="meta" run these.
#include <torch/library.h>

#include "../rms_norm.h"
#include "empty.h"

namespace normops {
namespace {

Tensor rms_norm_meta(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                     std::optional<double> eps, double) {
  check_rms_norm(input, normalized_shape, weight, eps);
  return empty_like_contiguous(input);
}

Tensor& rms_norm_out_meta(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                          std::optional<double> eps, double, Tensor& out) {
  check_rms_norm_out(input, normalized_shape, weight, eps, out);
  return out;
}

Tensor& rms_norm_inplace_meta(Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                              std::optional<double> eps, double) {
  check_rms_norm_inplace(input, normalized_shape, weight, eps);
  return input;
}

std::tuple<Tensor, Tensor> rms_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                                  c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                  std::optional<double> eps, double,
                                                  const OptionalTensor& grad_residual, OutputMask output_mask) {
  check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
  return {output_mask[0] ? empty_like_contiguous(input) : Tensor(),
          output_mask[1] && is_given(weight) ? empty_like_contiguous(*weight) : Tensor()};
}

std::tuple<Tensor&, Tensor&> rms_norm_backward_out_meta(const Tensor& grad_output, const Tensor& input,
                                                        c10::SymIntArrayRef normalized_shape,
                                                        const OptionalTensor& weight, std::optional<double> eps, double,
                                                        const OptionalTensor& grad_residual, OutputMask output_mask,
                                                        Tensor& grad_input, Tensor& grad_weight) {
  check_rms_norm_backward_out(grad_output, input, normalized_shape, weight, eps, grad_residual, output_mask, grad_input,
                              grad_weight);
  return {grad_input, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Meta, m) {
  m.impl("rms_norm", rms_norm_meta);
  m.impl("rms_norm.out", rms_norm_out_meta);
  m.impl("rms_norm_", rms_norm_inplace_meta);
  m.impl("rms_norm_backward", rms_norm_backward_meta);
  m.impl("rms_norm_backward.out", rms_norm_backward_out_meta);
}

}  // namespace normops
