#include "gated_rms_norm.h"

namespace normops {

Activation find_activation(const char* op, std::string_view name) {
  if (name == "silu" || name == "swish") return Activation::silu;
  TORCH_CHECK(name == "sigmoid", op, ": expected activation to be \"silu\", \"swish\" or \"sigmoid\", but got \"", name,
              "\"");
  return Activation::sigmoid;
}

namespace {

Gating check(const char* op, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
             const OptionalTensor& weight, std::optional<double> eps, std::string_view activation,
             bool norm_before_gate) {
  check_norm(op, input, normalized_shape, weight, eps);
  check_narrower_or_wider_input(op, "gate", gate, input);
  return {find_activation(op, activation), norm_before_gate};
}

}  // namespace

Gating check_gated_rms_norm(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, std::optional<double> eps, std::string_view activation,
                            bool norm_before_gate) {
  return check("gated_rms_norm", input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
}

Gating check_gated_rms_norm_out(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps, std::string_view activation,
                                bool norm_before_gate, const Tensor& out) {
  const Gating gating = check_gated_rms_norm(input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
  check_out("gated_rms_norm", {"out", out}, input,
            {{"input", input}, {"gate", gate}, {"weight", value_or_undefined(weight)}});
  return gating;
}

Gating check_gated_rms_norm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                     c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                     std::optional<double> eps, std::string_view activation, bool norm_before_gate) {
  constexpr const char* op = "gated_rms_norm_backward";
  const Gating gating = check(op, input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
  check_like_input(op, "grad_output", grad_output, input);
  return gating;
}

Gating check_gated_rms_norm_backward_out(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                         c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                         std::optional<double> eps, std::string_view activation, bool norm_before_gate,
                                         GatedOutputMask output_mask, const Tensor& grad_input, const Tensor& grad_gate,
                                         const Tensor& grad_weight) {
  constexpr const char* op = "gated_rms_norm_backward";
  const Gating gating = check_gated_rms_norm_backward(grad_output, input, gate, normalized_shape, weight, eps,
                                                      activation, norm_before_gate);
  const Tensor& given_weight = value_or_undefined(weight);
  const std::initializer_list<Named> inputs = {
      {"grad_output", grad_output}, {"input", input}, {"gate", gate}, {"weight", given_weight}};
  // A target that is not wanted is undefined here, which overlaps nothing.
  const Tensor none;
  const bool wanted[] = {output_mask[0], output_mask[1], output_mask[2] && given_weight.defined()};
  const Named targets[] = {{"grad_input", wanted[0] ? grad_input : none},
                           {"grad_gate", wanted[1] ? grad_gate : none},
                           {"grad_weight", wanted[2] ? grad_weight : none}};
  const Tensor* results[] = {&input, &gate, &given_weight};
  for (size_t i = 0; i < 3; i++) {
    if (wanted[i]) check_out(op, targets[i], *results[i], inputs);
  }
  check_disjoint(op, targets[0], targets[1]);
  check_disjoint(op, targets[0], targets[2]);
  check_disjoint(op, targets[1], targets[2]);
  return gating;
}

void check_gated_rms_norm_devices(const char* op, const Tensor& input, const Tensor& gate, const OptionalTensor& weight,
                                  const OptionalTensor& grad_output) {
  if (is_given(weight)) check_device(op, "weight", *weight, input);
  check_device(op, "gate", gate, input);
  if (is_given(grad_output)) check_device(op, "grad_output", *grad_output, input);
}

const c10::TypedOperatorHandle<GatedRmsNorm>& gated_rms_norm_op() {
  static const auto op = find_operator<GatedRmsNorm>("normops::gated_rms_norm");
  return op;
}

const c10::TypedOperatorHandle<GatedRmsNormOut>& gated_rms_norm_out_op() {
  static const auto op = find_operator<GatedRmsNormOut>("normops::gated_rms_norm", "out");
  return op;
}

const c10::TypedOperatorHandle<GatedRmsNormBackward>& gated_rms_norm_backward_op() {
  static const auto op = find_operator<GatedRmsNormBackward>("normops::gated_rms_norm_backward");
  return op;
}

const c10::TypedOperatorHandle<GatedRmsNormBackwardOut>& gated_rms_norm_backward_out_op() {
  static const auto op = find_operator<GatedRmsNormBackwardOut>("normops::gated_rms_norm_backward", "out");
  return op;
}

}  // namespace normops
