// The operators rms_norm and rms_norm_backward.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

struct RmsNorm {
  static constexpr const char *kName = "rms_norm", *kInplaceName = "rms_norm_";
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kWeight, kBias, kOutput};

  const Tensor& input;
  Norm norm;
  const OptionalTensor& bias;

  auto members() const { return std::tie(input, norm, bias); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    if (is_given(bias)) check_broadcast(op, "bias", *bias, input.sym_sizes(), norm.normalized_shape);
  }
  bool uses_bias() const { return is_given(bias); }
  Like<RmsNorm> like() const { return {&input}; }
};

struct RmsNormBackward {
  static constexpr const char *kName = "rms_norm_backward", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 3;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput,     kWeight,     kGradResidual,
                                             kBias,       kGradInput, kGradWeight, kGradBias};

  const Tensor& grad_output;
  const Tensor& input;
  Norm norm;
  const OptionalTensor& grad_residual;
  const OptionalTensor& bias;  // for the shape and the dtype of its gradient
  std::array<bool, kOutputs> output_mask;

  auto members() const { return std::tie(grad_output, input, norm, grad_residual, bias, output_mask); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_input(op, "grad_output", grad_output, input);
    if (is_given(grad_residual)) check_like_input(op, "grad_residual", *grad_residual, input);
    if (is_given(bias)) check_broadcast(op, "bias", *bias, input.sym_sizes(), norm.normalized_shape);
  }
  bool uses_bias() const { return is_given(bias) && output_mask[2]; }
  Like<RmsNormBackward> like() const {
    return {&defined_if(output_mask[0], input), &defined_if(output_mask[1], value_or_undefined(norm.weight)),
            &defined_if(output_mask[2], value_or_undefined(bias))};
  }
};

Tensor composite(const RmsNorm& arguments);
std::tuple<Tensor, Tensor, Tensor> composite(const RmsNormBackward& arguments);

}  // namespace normops
#pragma GCC visibility pop
