// The operators rms_norm and rms_norm_backward.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

struct RmsNorm {
  static constexpr const char *kName = "rms_norm", *kInplaceName = "rms_norm_";
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kWeight, kOutput};

  const Tensor& input;
  Norm norm;

  auto members() const { return std::tie(input, norm); }
  void check(const char* op) const { check_norm(op, input, norm); }
  Like<RmsNorm> like() const { return {&input}; }
};

struct RmsNormBackward {
  static constexpr const char *kName = "rms_norm_backward", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 2;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kWeight, kGradResidual, kGradInput, kGradWeight};

  const Tensor& grad_output;
  const Tensor& input;
  Norm norm;
  const OptionalTensor& grad_residual;
  std::array<bool, kOutputs> output_mask;

  auto members() const { return std::tie(grad_output, input, norm, grad_residual, output_mask); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_input(op, "grad_output", grad_output, input);
    if (is_given(grad_residual)) check_like_input(op, "grad_residual", *grad_residual, input);
  }
  Like<RmsNormBackward> like() const {
    return {&if_wanted(output_mask[0], input), &if_wanted(output_mask[1], value_or_undefined(norm.weight))};
  }
};

}  // namespace normops
#pragma GCC visibility pop
