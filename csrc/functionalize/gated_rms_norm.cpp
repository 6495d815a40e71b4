// How the operators of gated_rms_norm and gated_rms_norm_backward trace that write into given tensors.
#include "../gated_rms_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "functional.h"

namespace normops {
namespace {

Tensor& gated_rms_norm_out_functionalize(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                         const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                         std::string_view activation, bool norm_before_gate, Tensor& out) {
  check_functional("gated_rms_norm", "out", out);
  const Tensor plain_input = unwrap(input), plain_gate = unwrap(gate), plain_out = unwrap(out);
  const OptionalTensor plain_weight = unwrap(weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_gated_rms_norm_out(plain_input, plain_gate, normalized_shape, plain_weight, eps, activation, norm_before_gate,
                           plain_out);
  replace(out, gated_rms_norm_op().call(plain_input, plain_gate, normalized_shape, plain_weight, eps, weight_offset,
                                        activation, norm_before_gate));
  return out;
}

std::tuple<Tensor&, Tensor&, Tensor&> gated_rms_norm_backward_out_functionalize(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
    bool norm_before_gate, GatedOutputMask output_mask, Tensor& grad_input, Tensor& grad_gate, Tensor& grad_weight) {
  constexpr const char* op = "gated_rms_norm_backward";
  check_functional(op, "grad_input", grad_input);
  check_functional(op, "grad_gate", grad_gate);
  check_functional(op, "grad_weight", grad_weight);
  const Tensor plain_grad_output = unwrap(grad_output), plain_input = unwrap(input), plain_gate = unwrap(gate);
  const OptionalTensor plain_weight = unwrap(weight);
  const Tensor plain_grad_input = unwrap(grad_input), plain_grad_gate = unwrap(grad_gate);
  const Tensor plain_grad_weight = unwrap(grad_weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_gated_rms_norm_backward_out(plain_grad_output, plain_input, plain_gate, normalized_shape, plain_weight, eps,
                                    activation, norm_before_gate, output_mask, plain_grad_input, plain_grad_gate,
                                    plain_grad_weight);
  const auto [dx, dg, dw] =
      gated_rms_norm_backward_op().call(plain_grad_output, plain_input, plain_gate, normalized_shape, plain_weight, eps,
                                        weight_offset, activation, norm_before_gate, output_mask);
  if (dx.defined()) replace(grad_input, dx);
  if (dg.defined()) replace(grad_gate, dg);
  if (dw.defined()) replace(grad_weight, dw);
  return {grad_input, grad_gate, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Functionalize, m) {
  m.impl("gated_rms_norm.out", gated_rms_norm_out_functionalize);
  m.impl("gated_rms_norm_backward.out", gated_rms_norm_backward_out_functionalize);
}

}  // namespace normops
