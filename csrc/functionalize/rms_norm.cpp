// How the operators of rms_norm and rms_norm_backward trace that write into given tensors.
#include "../rms_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "functional.h"

namespace normops {
namespace {

Tensor& rms_norm_out_functionalize(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                   const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                   Tensor& out) {
  check_functional("rms_norm", "out", out);
  const Tensor plain_input = unwrap(input), plain_out = unwrap(out);
  const OptionalTensor plain_weight = unwrap(weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_rms_norm_out(plain_input, normalized_shape, plain_weight, eps, plain_out);
  replace(out, rms_norm_op().call(plain_input, normalized_shape, plain_weight, eps, weight_offset));
  return out;
}

Tensor& rms_norm_inplace_functionalize(Tensor& input, c10::SymIntArrayRef normalized_shape,
                                       const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
  check_functional("rms_norm_", "input", input);
  const Tensor plain_input = unwrap(input);
  const OptionalTensor plain_weight = unwrap(weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_rms_norm_inplace(plain_input, normalized_shape, plain_weight, eps);
  replace(input, rms_norm_op().call(plain_input, normalized_shape, plain_weight, eps, weight_offset));
  return input;
}

std::tuple<Tensor&, Tensor&> rms_norm_backward_out_functionalize(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    std::optional<double> eps, double weight_offset, const OptionalTensor& grad_residual, OutputMask output_mask,
    Tensor& grad_input, Tensor& grad_weight) {
  constexpr const char* op = "rms_norm_backward";
  check_functional(op, "grad_input", grad_input);
  check_functional(op, "grad_weight", grad_weight);
  const Tensor plain_grad_output = unwrap(grad_output), plain_input = unwrap(input);
  const OptionalTensor plain_weight = unwrap(weight), plain_residual = unwrap(grad_residual);
  const Tensor plain_grad_input = unwrap(grad_input), plain_grad_weight = unwrap(grad_weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_rms_norm_backward_out(plain_grad_output, plain_input, normalized_shape, plain_weight, eps, plain_residual,
                              output_mask, plain_grad_input, plain_grad_weight);
  const auto [dx, dw] = rms_norm_backward_op().call(plain_grad_output, plain_input, normalized_shape, plain_weight, eps,
                                                    weight_offset, plain_residual, output_mask);
  if (dx.defined()) replace(grad_input, dx);
  if (dw.defined()) replace(grad_weight, dw);
  return {grad_input, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Functionalize, m) {
  m.impl("rms_norm.out", rms_norm_out_functionalize);
  m.impl("rms_norm_", rms_norm_inplace_functionalize);
  m.impl("rms_norm_backward.out", rms_norm_backward_out_functionalize);
}

}  // namespace normops
