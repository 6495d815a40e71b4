// The derivatives of channel_rms_norm and channel_rms_norm_backward. Nothing is saved but the arguments.
#include "../channel_rms_norm.h"

#include "kernels.h"

namespace normops {

template <>
struct Derivative<ChannelRmsNorm> {
  static constexpr const char* kName = "ChannelRmsNormBackward";
  static constexpr Uses<3, 3> kNeededForGrad = {{
      // depends on: input, weight, bias, as the slope of the activation depends on all of them
      {true, true, true},  // input
      {true, true, true},  // weight
      {true, true, true},  // bias
  }};
  static Tensor output(const ChannelRmsNorm& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const ChannelRmsNorm& saved,
                                const Needed<3>& needed) {
    const auto& [input, norm, bias, dim, activation] = saved;
    return to_list(call(ChannelRmsNormBackward{grad_outputs[0], input, norm, bias, needed, dim, activation}));
  }
};

template <>
struct Derivative<ChannelRmsNormBackward> {
  static constexpr const char* kName = "ChannelRmsNormBackwardBackward";
  static constexpr Uses<4, 4> kNeededForGrad = {{
      // depends on: grad_output, input, weight, bias
      {false, true, true, true},  // grad_output
      {true, true, true, true},   // input
      {true, true, true, true},   // weight
      {true, true, true, true},   // bias
  }};
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<ChannelRmsNorm, ChannelRmsNormBackward>()); }

}  // namespace normops
