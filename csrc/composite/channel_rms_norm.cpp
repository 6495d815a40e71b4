// The definitions of channel_rms_norm and channel_rms_norm_backward: rms_norm of rows, each with the channels of one
// position.
#include "../channel_rms_norm.h"

#include <ATen/TensorOperators.h>

#include "../rms_norm.h"
#include "composite.h"
#include "kernels.h"

namespace normops {
namespace {

// Returns the norm of rows in the compute dtype, for the activation. It is rounded before that only if the rounding
// option rounds intermediate results.
Tensor norm_of_rows(const Tensor& rows, const Norm& norm, const OptionalTensor& bias) {
  const Tensor input = norm.parsed_rounding().multiplied ? rows : to_compute_dtype(rows, rows);
  return to_compute_dtype(call(RmsNorm{input, norm, bias})[0], rows);
}

}  // namespace

Tensor composite(const ChannelRmsNorm& arguments) {
  const auto& [input, norm, bias, dim, name] = arguments;
  const Tensor rows = input.movedim(dim, -1);
  const auto activation = find_activation(name);
  const Tensor output = activation.has_value() ? activate(norm_of_rows(rows, norm, bias), *activation)
                                               : call(RmsNorm{rows, norm, bias})[0];
  return output.to(input.scalar_type()).movedim(-1, dim);
}

std::tuple<Tensor, Tensor, Tensor> composite(const ChannelRmsNormBackward& arguments) {
  const auto& [grad_output, input, norm, bias, output_mask, dim, name] = arguments;
  Tensor rows = input.movedim(dim, -1), dy = grad_output.movedim(dim, -1);
  if (const auto activation = find_activation(name); activation.has_value()) {
    dy = to_compute_dtype(dy, rows) * activation_slope(norm_of_rows(rows, norm, bias), *activation);
    if (norm.parsed_rounding().multiplied) {
      dy = dy.to(input.scalar_type());
    } else {
      rows = to_compute_dtype(rows, rows);
    }
  }
  auto [grad_rows, grad_weight, grad_bias] = call(RmsNormBackward{dy, rows, norm, std::nullopt, bias, output_mask});
  if (grad_rows.defined()) grad_rows = grad_rows.to(input.scalar_type()).movedim(-1, dim);
  return {grad_rows, grad_weight, grad_bias};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  register_all<Composite>(m, List<ChannelRmsNorm, ChannelRmsNormBackward>());
}

}  // namespace normops
