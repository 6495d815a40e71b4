#include "rms_norm.h"

namespace normops {

void check_rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    std::optional<double> eps) {
  check_norm("rms_norm", input, normalized_shape, weight, eps);
}

void check_rms_norm_out(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        std::optional<double> eps, const Tensor& out) {
  check_rms_norm(input, normalized_shape, weight, eps);
  check_out("rms_norm", {"out", out}, input, {{"input", input}, {"weight", value_or_undefined(weight)}});
}

void check_rms_norm_inplace(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                            std::optional<double> eps) {
  constexpr const char* op = "rms_norm_";
  check_norm(op, input, normalized_shape, weight, eps);
  check_out(op, {"input", input}, input, {{"weight", value_or_undefined(weight)}});
}

void check_rms_norm_backward(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor& weight, std::optional<double> eps,
                             const OptionalTensor& grad_residual) {
  constexpr const char* op = "rms_norm_backward";
  check_norm(op, input, normalized_shape, weight, eps);
  check_narrower_input(op, "grad_output", grad_output, input);
  if (is_given(grad_residual)) check_like_input(op, "grad_residual", *grad_residual, input);
}

void check_rms_norm_backward_out(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, std::optional<double> eps,
                                 const OptionalTensor& grad_residual, OutputMask output_mask, const Tensor& grad_input,
                                 const Tensor& grad_weight) {
  constexpr const char* op = "rms_norm_backward";
  check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
  const bool has_grad_weight = output_mask[1] && is_given(weight);
  const std::initializer_list<Named> inputs = {{"grad_output", grad_output},
                                               {"input", input},
                                               {"weight", value_or_undefined(weight)},
                                               {"grad_residual", value_or_undefined(grad_residual)}};
  if (output_mask[0]) check_out(op, {"grad_input", grad_input}, input, inputs);
  if (has_grad_weight) check_out(op, {"grad_weight", grad_weight}, *weight, inputs);
  if (output_mask[0] && has_grad_weight) check_disjoint(op, {"grad_input", grad_input}, {"grad_weight", grad_weight});
}

void check_rms_norm_devices(const char* op, const Tensor& input, const OptionalTensor& weight) {
  if (is_given(weight)) check_device(op, "weight", *weight, input);
}

void check_rms_norm_backward_devices(const Tensor& grad_output, const Tensor& input, const OptionalTensor& weight,
                                     const OptionalTensor& grad_residual) {
  constexpr const char* op = "rms_norm_backward";
  if (is_given(weight)) check_device(op, "weight", *weight, input);
  check_device(op, "grad_output", grad_output, input);
  if (is_given(grad_residual)) check_device(op, "grad_residual", *grad_residual, input);
}

const c10::TypedOperatorHandle<RmsNorm>& rms_norm_op() {
  static const auto op = find_operator<RmsNorm>("normops::rms_norm");
  return op;
}

const c10::TypedOperatorHandle<RmsNormOut>& rms_norm_out_op() {
  static const auto op = find_operator<RmsNormOut>("normops::rms_norm", "out");
  return op;
}

const c10::TypedOperatorHandle<RmsNormInplace>& rms_norm_inplace_op() {
  static const auto op = find_operator<RmsNormInplace>("normops::rms_norm_");
  return op;
}

const c10::TypedOperatorHandle<RmsNormBackward>& rms_norm_backward_op() {
  static const auto op = find_operator<RmsNormBackward>("normops::rms_norm_backward");
  return op;
}

const c10::TypedOperatorHandle<RmsNormBackwardOut>& rms_norm_backward_out_op() {
  static const auto op = find_operator<RmsNormBackwardOut>("normops::rms_norm_backward", "out");
  return op;
}

}  // namespace normops
