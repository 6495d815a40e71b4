#include "add_rms_norm.h"

namespace normops {
namespace {

void check(const char* op, const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
           const OptionalTensor& weight, std::optional<double> eps) {
  check_norm(op, input, normalized_shape, weight, eps);
  check_wider_input(op, "residual", residual, input);
}

}  // namespace

void check_add_rms_norm(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                        const OptionalTensor& weight, std::optional<double> eps) {
  check("add_rms_norm", input, residual, normalized_shape, weight, eps);
}

void check_add_rms_norm_out(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, std::optional<double> eps, const Tensor& out,
                            const Tensor& residual_out) {
  constexpr const char* op = "add_rms_norm";
  check(op, input, residual, normalized_shape, weight, eps);
  const std::initializer_list<Named> inputs = {
      {"input", input}, {"residual", residual}, {"weight", value_or_undefined(weight)}};
  check_out(op, {"out", out}, input, inputs);
  check_out(op, {"residual_out", residual_out}, residual, inputs);
  check_disjoint(op, {"out", out}, {"residual_out", residual_out});
  // It is written before the weight is read.
  check_disjoint(op, {"residual_out", residual_out}, {"weight", value_or_undefined(weight)});
}

void check_add_rms_norm_inplace(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps) {
  constexpr const char* op = "add_rms_norm_";
  check(op, input, residual, normalized_shape, weight, eps);
  check_out(op, {"input", input}, input, {{"weight", value_or_undefined(weight)}});
  check_out(op, {"residual", residual}, residual, {});
  check_disjoint(op, {"input", input}, {"residual", residual});
  check_disjoint(op, {"residual", residual}, {"weight", value_or_undefined(weight)});
}

void check_add_rms_norm_devices(const char* op, const Tensor& input, const Tensor& residual,
                                const OptionalTensor& weight) {
  if (is_given(weight)) check_device(op, "weight", *weight, input);
  check_device(op, "residual", residual, input);
}

const c10::TypedOperatorHandle<AddRmsNorm>& add_rms_norm_op() {
  static const auto op = find_operator<AddRmsNorm>("normops::add_rms_norm");
  return op;
}

const c10::TypedOperatorHandle<AddRmsNormOut>& add_rms_norm_out_op() {
  static const auto op = find_operator<AddRmsNormOut>("normops::add_rms_norm", "out");
  return op;
}

const c10::TypedOperatorHandle<AddRmsNormInplace>& add_rms_norm_inplace_op() {
  static const auto op = find_operator<AddRmsNormInplace>("normops::add_rms_norm_");
  return op;
}

}  // namespace normops
