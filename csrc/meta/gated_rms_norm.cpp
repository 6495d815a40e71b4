// Shapes, dtypes and strides of gated_rms_norm and gated_rms_norm_backward.
#include "../gated_rms_norm.h"

#include <torch/library.h>

#include "empty.h"

namespace normops {
namespace {

Tensor gated_rms_norm_meta(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                           const OptionalTensor& weight, std::optional<double> eps, double, std::string_view activation,
                           bool norm_before_gate) {
  check_gated_rms_norm(input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
  return empty_like_contiguous(input);
}

Tensor& gated_rms_norm_out_meta(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps, double,
                                std::string_view activation, bool norm_before_gate, Tensor& out) {
  check_gated_rms_norm_out(input, gate, normalized_shape, weight, eps, activation, norm_before_gate, out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                                                const Tensor& gate,
                                                                c10::SymIntArrayRef normalized_shape,
                                                                const OptionalTensor& weight, std::optional<double> eps,
                                                                double, std::string_view activation,
                                                                bool norm_before_gate, GatedOutputMask output_mask) {
  check_gated_rms_norm_backward(grad_output, input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
  return {output_mask[0] ? empty_like_contiguous(input) : Tensor(),
          output_mask[1] ? empty_like_contiguous(gate) : Tensor(),
          output_mask[2] && is_given(weight) ? empty_like_contiguous(*weight) : Tensor()};
}

std::tuple<Tensor&, Tensor&, Tensor&> gated_rms_norm_backward_out_meta(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double, std::string_view activation, bool norm_before_gate,
    GatedOutputMask output_mask, Tensor& grad_input, Tensor& grad_gate, Tensor& grad_weight) {
  check_gated_rms_norm_backward_out(grad_output, input, gate, normalized_shape, weight, eps, activation,
                                    norm_before_gate, output_mask, grad_input, grad_gate, grad_weight);
  return {grad_input, grad_gate, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Meta, m) {
  m.impl("gated_rms_norm", gated_rms_norm_meta);
  m.impl("gated_rms_norm.out", gated_rms_norm_out_meta);
  m.impl("gated_rms_norm_backward", gated_rms_norm_backward_meta);
  m.impl("gated_rms_norm_backward.out", gated_rms_norm_backward_out_meta);
}

}  // namespace normops
