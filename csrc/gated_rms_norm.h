// The operators gated_rms_norm and gated_rms_norm_backward.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// Returns the activation of this name. Throws c10::Error if the name is unknown.
Activation parse_activation(const char* op, std::string_view name);

struct GatedRmsNorm {
  static constexpr const char *kName = "gated_rms_norm", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kGate, kWeight, kOutput};

  const Tensor& input;
  const Tensor& gate;
  Norm norm;
  std::string_view activation;
  bool norm_before_gate;

  auto members() const { return std::tie(input, gate, norm, activation, norm_before_gate); }
  Gating gating() const { return {parse_activation(kName, activation), norm_before_gate}; }
  void fill(KernelArgs& args) const { args.gating = gating(); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_or_wider_input(op, "gate", gate, input);
    parse_activation(op, activation);
  }
  Like<GatedRmsNorm> like() const { return {&input}; }
};

struct GatedRmsNormBackward {
  static constexpr const char *kName = "gated_rms_norm_backward", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 3;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kGate, kWeight, kGradInput, kGradGate, kGradWeight};

  const Tensor& grad_output;
  const Tensor& input;
  const Tensor& gate;
  Norm norm;
  std::string_view activation;
  bool norm_before_gate;
  std::array<bool, kOutputs> output_mask;

  auto members() const { return std::tie(grad_output, input, gate, norm, activation, norm_before_gate, output_mask); }
  Gating gating() const { return {parse_activation(kName, activation), norm_before_gate}; }
  void fill(KernelArgs& args) const { args.gating = gating(); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_or_wider_input(op, "gate", gate, input);
    parse_activation(op, activation);
    check_like_input(op, "grad_output", grad_output, input);
  }
  Like<GatedRmsNormBackward> like() const {
    return {&defined_if(output_mask[0], input), &defined_if(output_mask[1], gate),
            &defined_if(output_mask[2], value_or_undefined(norm.weight))};
  }
};

Tensor composite(const GatedRmsNorm& arguments);
std::tuple<Tensor, Tensor, Tensor> composite(const GatedRmsNormBackward& arguments);

}  // namespace normops
#pragma GCC visibility pop
