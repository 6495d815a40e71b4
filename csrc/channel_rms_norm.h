// The operators channel_rms_norm and channel_rms_norm_backward: rms_norm over one dimension, for example the channels
// of [N, C, H, W], followed by an activation.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// The activation that changes nothing.
constexpr std::string_view kNoActivation = "identity";

// `dim` is negative, so that a leading batch dimension, such as vmap's, does not change it. weight and bias have shape
// [..., C]. Their leading dimensions broadcast to those of input with `dim` moved to the end.
void check_channels(const char* op, const Tensor& input, const Norm& norm, const OptionalTensor& bias, int64_t dim,
                    std::string_view activation);

struct ChannelRmsNorm {
  static constexpr const char *kName = "channel_rms_norm", *kInplaceName = "channel_rms_norm_";
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kWeight, kBias, kOutput};

  const Tensor& input;
  Norm norm;
  const OptionalTensor& bias;
  int64_t dim;
  std::string_view activation;

  auto members() const { return std::tie(input, norm, bias, dim, activation); }
  void check(const char* op) const { check_channels(op, input, norm, bias, dim, activation); }
  Like<ChannelRmsNorm> like() const { return {&input}; }
};

struct ChannelRmsNormBackward {
  static constexpr const char *kName = "channel_rms_norm_backward", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 3;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kWeight, kBias, kGradInput, kGradWeight, kGradBias};

  const Tensor& grad_output;
  const Tensor& input;
  Norm norm;
  const OptionalTensor& bias;
  std::array<bool, kOutputs> output_mask;
  int64_t dim;
  std::string_view activation;

  auto members() const { return std::tie(grad_output, input, norm, bias, output_mask, dim, activation); }
  void check(const char* op) const {
    check_channels(op, input, norm, bias, dim, activation);
    check_like_input(op, "grad_output", grad_output, input);
  }
  Like<ChannelRmsNormBackward> like() const {
    return {&defined_if(output_mask[0], input), &defined_if(output_mask[1], value_or_undefined(norm.weight)),
            &defined_if(output_mask[2], value_or_undefined(bias))};
  }
};

Tensor composite(const ChannelRmsNorm& arguments);
std::tuple<Tensor, Tensor, Tensor> composite(const ChannelRmsNormBackward& arguments);

}  // namespace normops
#pragma GCC visibility pop
