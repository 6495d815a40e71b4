// The derivative of add_rms_norm: rms_norm_backward of the sum, which is its output residual_out; input and residual
// receive the same gradient.
#include "../add_rms_norm.h"

#include <torch/library.h>

#include "../composite/add_rms_norm.h"
#include "../rms_norm.h"
#include "node.h"
#include "write.h"

namespace normops {
namespace {

using torch::autograd::compute_requires_grad;

struct AddRmsNormGradient {
  static constexpr const char* kName = "AddRmsNormBackward";
  static constexpr size_t kSaved = 2, kSavedOutputs = 1;  // residual_out, weight
  static constexpr size_t kInputs = 3;                    // input, residual, weight
  using Attributes = NormAttributes;

  static variable_list backward(const variable_list& grad_outputs, const variable_list& saved,
                                const Attributes& attributes, const std::array<bool, kInputs>& needed) {
    const auto& [normalized_dims, eps, weight_offset] = attributes;
    const Tensor &grad_output = grad_outputs[0], &grad_residual_out = grad_outputs[1];
    const Tensor &residual_out = saved[0], &weight = saved[1];
    Tensor grad_sum = grad_residual_out, grad_weight;
    if (grad_output.defined()) {
      std::tie(grad_sum, grad_weight) = rms_norm_backward_op().call(
          grad_output, residual_out, last_sizes(residual_out, normalized_dims), if_defined(weight), eps, weight_offset,
          if_defined(grad_residual_out), {needed[0] || needed[1], needed[2]});
    }
    // Autograd converts it to the input's dtype, where that is another.
    return {needed[0] ? grad_sum : Tensor(), needed[1] ? grad_sum : Tensor(), grad_weight};
  }
};

std::tuple<Tensor, Tensor> add_rms_norm_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& residual,
                                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                 std::optional<double> eps, double weight_offset) {
  check_add_rms_norm_devices("add_rms_norm", input, residual, weight);
  const Tensor& given_weight = value_or_undefined(weight);
  if (has_tangent(input, residual, given_weight)) {
    return add_rms_norm_composite(input, residual, normalized_shape, weight, eps, weight_offset);
  }
  auto [output, residual_out] =
      redispatch(add_rms_norm_op(), keys, input, residual, normalized_shape, weight, eps, weight_offset);
  if (compute_requires_grad(input, residual, given_weight)) {
    auto node = make_node<OperatorNode<AddRmsNormGradient>>();
    node->connect(input, residual, given_weight);
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(residual_out, node);
    node->save(make_attributes(normalized_shape, eps, weight_offset), residual_out, given_weight);
  }
  return {std::move(output), std::move(residual_out)};
}

std::tuple<Tensor&, Tensor&> add_rms_norm_out_autograd(c10::DispatchKeySet keys, const Tensor& input,
                                                       const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                                       const OptionalTensor& weight, std::optional<double> eps,
                                                       double weight_offset, Tensor& out, Tensor& residual_out) {
  constexpr const char* op = "add_rms_norm";
  check_add_rms_norm_devices(op, input, residual, weight);
  check_no_grad(op, input, residual, value_or_undefined(weight), out, residual_out);
  redispatch(add_rms_norm_out_op(), keys, input, residual, normalized_shape, weight, eps, weight_offset, out,
             residual_out);
  return {out, residual_out};
}

void add_rms_norm_inplace_autograd(c10::DispatchKeySet keys, Tensor& input, Tensor& residual,
                                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                   std::optional<double> eps, double weight_offset) {
  constexpr const char* op = "add_rms_norm_";
  check_add_rms_norm_devices(op, input, residual, weight);
  check_no_grad(op, input, residual, value_or_undefined(weight));
  redispatch(add_rms_norm_inplace_op(), keys, input, residual, normalized_shape, weight, eps, weight_offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, ADInplaceOrView, m) {
  m.impl("add_rms_norm.out", CountedWrite<add_rms_norm_out_op, AddRmsNormOut>::call);
  m.impl("add_rms_norm_", CountedWrite<add_rms_norm_inplace_op, AddRmsNormInplace>::call);
}

TORCH_LIBRARY_IMPL(normops, Autograd, m) {
  m.impl("add_rms_norm", add_rms_norm_autograd);
  m.impl("add_rms_norm.out", add_rms_norm_out_autograd);
  m.impl("add_rms_norm_", add_rms_norm_inplace_autograd);
}

}  // namespace normops
