// The derivatives of channel_rms_norm and channel_rms_norm_backward. Nothing is saved but the arguments.
#include "../channel_rms_norm.h"

#include <ATen/TensorOperators.h>

#include "../composite/composite.h"
#include "../rms_norm.h"
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
  // Channels are moved to the end. With z the argument of the activation and z_t its tangent, the gradients are those
  // of the sum of dy slope(z) z_t.
  static variable_list backward(const variable_list& grad_outputs, const ChannelRmsNormBackward& saved,
                                const Needed<4>&) {
    const auto as_computed = [&](const Tensor& tensor) { return to_compute_dtype(tensor, saved.input); };
    const auto as_rows = [&](const Tensor& tensor) { return as_computed(tensor).movedim(saved.dim, -1); };
    const auto as_channels = [&](const Tensor& rows) { return rows.defined() ? rows.movedim(-1, saved.dim) : rows; };
    const OptionalTensor weight = if_defined(as_computed(value_or_undefined(saved.norm.weight))), none;
    const Norm norm = {saved.norm.normalized_shape, weight, saved.norm.eps, saved.norm.weight_offset, kRoundOnce};
    const OptionalTensor bias = if_defined(as_computed(value_or_undefined(saved.bias)));
    const Tensor h = as_rows(saved.input), dy = as_rows(saved.grad_output);
    const Tensor h_t = grad_outputs[0].defined() ? as_rows(grad_outputs[0]) : Tensor();
    const Tensor weight_t = as_computed(grad_outputs[1]), bias_t = as_computed(grad_outputs[2]);
    const auto activation = find_activation(saved.activation);
    const Tensor z = activation.has_value() ? call(RmsNorm{h, norm, bias})[0] : Tensor();
    const Tensor slope = activation.has_value() ? activation_slope(z, *activation) : Tensor();

    auto [z_t, of_h, of_weight] =
        normalize_backward_backward(h_t, weight_t, activation.has_value() ? dy * slope : dy, h, norm);
    if (bias_t.defined()) z_t = plus(z_t, bias_t.expand_symint(h.sym_sizes()));
    if (!activation.has_value()) return {as_channels(z_t), as_channels(of_h), of_weight, Tensor()};
    const Tensor through_slope = dy * activation_curvature(z, *activation) * z_t;
    const auto [through_h, through_weight, of_bias] =
        call(RmsNormBackward{through_slope, h, norm, none, bias, {true, weight.has_value(), bias.has_value()}});
    return {as_channels(slope * z_t), as_channels(plus(of_h, through_h)), plus(of_weight, through_weight), of_bias};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<ChannelRmsNorm, ChannelRmsNormBackward>()); }

}  // namespace normops
