// How the operators of add_rms_norm trace that write into given tensors.
#include "../add_rms_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "functional.h"

namespace normops {
namespace {

std::tuple<Tensor&, Tensor&> add_rms_norm_out_functionalize(const Tensor& input, const Tensor& residual,
                                                            c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, std::optional<double> eps,
                                                            double weight_offset, Tensor& out, Tensor& residual_out) {
  constexpr const char* op = "add_rms_norm";
  check_functional(op, "out", out);
  check_functional(op, "residual_out", residual_out);
  const Tensor plain_input = unwrap(input), plain_residual = unwrap(residual);
  const OptionalTensor plain_weight = unwrap(weight);
  const Tensor plain_out = unwrap(out), plain_residual_out = unwrap(residual_out);
  at::AutoDispatchSkipFunctionalize guard;
  check_add_rms_norm_out(plain_input, plain_residual, normalized_shape, plain_weight, eps, plain_out,
                         plain_residual_out);
  const auto [y, h] =
      add_rms_norm_op().call(plain_input, plain_residual, normalized_shape, plain_weight, eps, weight_offset);
  replace(out, y);
  replace(residual_out, h);
  return {out, residual_out};
}

void add_rms_norm_inplace_functionalize(Tensor& input, Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
  constexpr const char* op = "add_rms_norm_";
  check_functional(op, "input", input);
  check_functional(op, "residual", residual);
  const Tensor plain_input = unwrap(input), plain_residual = unwrap(residual);
  const OptionalTensor plain_weight = unwrap(weight);
  at::AutoDispatchSkipFunctionalize guard;
  check_add_rms_norm_inplace(plain_input, plain_residual, normalized_shape, plain_weight, eps);
  const auto [y, h] =
      add_rms_norm_op().call(plain_input, plain_residual, normalized_shape, plain_weight, eps, weight_offset);
  replace(input, y);
  replace(residual, h);
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, Functionalize, m) {
  m.impl("add_rms_norm.out", add_rms_norm_out_functionalize);
  m.impl("add_rms_norm_", add_rms_norm_inplace_functionalize);
}

}  // namespace normops
