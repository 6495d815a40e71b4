// The derivatives of gated_rms_norm and gated_rms_norm_backward. Nothing is saved but the arguments.
#include "../gated_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <string>

#include "../composite/gated_rms_norm.h"
#include "../composite/rms_norm.h"
#include "../rms_norm.h"
#include "rms_norm.h"
#include "write.h"

namespace normops {
namespace {

using torch::autograd::compute_requires_grad;

// normalized_dims, eps, weight_offset, activation, norm_before_gate
using GatedAttributes = std::tuple<int64_t, std::optional<double>, double, std::string, bool>;

struct GatedRmsNormGradient {
  static constexpr const char* kName = "GatedRmsNormBackward";
  static constexpr size_t kSaved = 3, kSavedOutputs = 0, kInputs = 3;  // input, gate, weight
  using Attributes = GatedAttributes;

  static variable_list backward(const variable_list& grad_outputs, const variable_list& saved,
                                const Attributes& attributes, const std::array<bool, kInputs>& needed) {
    if (!grad_outputs[0].defined() || needed == std::array<bool, kInputs>()) return variable_list(kInputs);
    const auto& [normalized_dims, eps, weight_offset, activation, norm_before_gate] = attributes;
    const Tensor &input = saved[0], &gate = saved[1], &weight = saved[2];
    auto [grad_input, grad_gate, grad_weight] =
        gated_rms_norm_backward_op().call(grad_outputs[0], input, gate, last_sizes(input, normalized_dims),
                                          if_defined(weight), eps, weight_offset, activation, norm_before_gate, needed);
    return {std::move(grad_input), std::move(grad_gate), std::move(grad_weight)};
  }
};

Tensor sum_of_defined(const Tensor& a, const Tensor& b) { return !a.defined() ? b : b.defined() ? a + b : a; }

// The derivative of gated_rms_norm_backward, with respect to (grad_output, input, gate, weight), by the chain rule: it
// is rms_norm_backward between products with the activation a, its slope a' and its curvature a''; docs/derivation.md.
//     norm first: (grad_input, grad_weight) = rms_norm_backward(dy a, x),  grad_gate = dy rms_norm(x) a'
//     gate first: (du, grad_weight) = rms_norm_backward(dy, x a),          grad_input = du a,  grad_gate = du x a'
// u, v and z are the incoming gradients of grad_input, grad_weight and grad_gate.
struct GatedRmsNormBackwardGradient {
  static constexpr const char* kName = "GatedRmsNormBackwardBackward";
  static constexpr size_t kSaved = 4, kSavedOutputs = 0, kInputs = 4;
  using Attributes = GatedAttributes;

  static variable_list backward(const variable_list& grad_outputs, const variable_list& saved,
                                const Attributes& attributes, const std::array<bool, kInputs>& needed) {
    const auto& [normalized_dims, eps, weight_offset, activation, norm_before_gate] = attributes;
    const Tensor &grad_output = saved[0], &input = saved[1], &gate = saved[2], &weight = saved[3];
    const auto computed = [&](const Tensor& tensor) {
      return tensor.defined() ? to_compute_dtype(tensor, input) : Tensor();
    };
    const Tensor dy = computed(grad_output), x = computed(input), g = computed(gate), w = computed(weight);
    const Tensor u = computed(grad_outputs[0]), z = computed(grad_outputs[1]), v = computed(grad_outputs[2]);
    const Activation kind = find_activation("gated_rms_norm_backward", activation);
    const Tensor a = activate(g, kind), slope = activation_slope(g, kind);
    const Tensor z_curvature = z.defined() ? z * activation_curvature(g, kind) : Tensor();
    const c10::SymIntArrayRef normalized_shape = last_sizes(input, normalized_dims);
    const NormAttributes norm = {normalized_dims, eps, weight_offset};

    Tensor for_dy, for_x, for_g, for_w;
    if (norm_before_gate) {
      const auto through_backward =
          rms_norm_backward_backward({u, v}, {dy * a, x, w}, norm, {true, needed[1], needed[3], false});
      if (through_backward[0].defined()) {
        for_dy = through_backward[0] * a;
        for_g = through_backward[0] * dy * slope;
      }
      for_x = through_backward[1];
      for_w = through_backward[2];
      if (z.defined()) {
        const Tensor normed = rms_norm_op().call(x, normalized_shape, if_defined(w), eps, weight_offset);
        for_dy = sum_of_defined(for_dy, z * slope * normed);
        for_g = sum_of_defined(for_g, z_curvature * dy * normed);
        const auto [through_x, through_w] =
            rms_norm_backward_op().call(z * slope * dy, x, normalized_shape, if_defined(w), eps, weight_offset,
                                        std::nullopt, {needed[1], needed[3]});
        for_x = sum_of_defined(for_x, through_x);
        for_w = sum_of_defined(for_w, through_w);
      }
    } else {
      const Tensor through_input = u.defined() ? u * a : Tensor();
      const Tensor through_gate = z.defined() ? z * x * slope : Tensor();
      const auto through_backward = rms_norm_backward_backward({sum_of_defined(through_input, through_gate), v},
                                                               {dy, x * a, w}, norm, {true, true, needed[3], false});
      for_dy = through_backward[0];
      if (through_backward[1].defined()) {
        for_x = through_backward[1] * a;
        for_g = through_backward[1] * x * slope;
      }
      for_w = through_backward[2];
      if (u.defined() || z.defined()) {
        const Tensor du = std::get<0>(rms_norm_backward_op().call(dy, x * a, normalized_shape, if_defined(w), eps,
                                                                  weight_offset, std::nullopt, {true, false}));
        if (u.defined()) for_g = sum_of_defined(for_g, u * du * slope);
        if (z.defined()) {
          for_x = sum_of_defined(for_x, z * du * slope);
          for_g = sum_of_defined(for_g, z_curvature * du * x);
        }
      }
    }
    const auto result = [&](size_t index, const Tensor& gradient) {
      return needed[index] && gradient.defined() ? gradient.to(saved[index].scalar_type()) : Tensor();
    };
    return {result(0, for_dy), result(1, for_x), result(2, for_g), result(3, for_w)};
  }
};

Tensor gated_rms_norm_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& gate,
                               c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                               std::optional<double> eps, double weight_offset, std::string_view activation,
                               bool norm_before_gate) {
  check_gated_rms_norm_devices("gated_rms_norm", input, gate, weight);
  const Tensor& given_weight = value_or_undefined(weight);
  if (has_tangent(input, gate, given_weight)) {
    return gated_rms_norm_composite(input, gate, normalized_shape, weight, eps, weight_offset, activation,
                                    norm_before_gate);
  }
  const bool requires_grad = compute_requires_grad(input, gate, given_weight);
  const auto node = requires_grad ? make_node<OperatorNode<GatedRmsNormGradient>>() : nullptr;
  if (requires_grad) {
    node->connect(input, gate, given_weight);
    // Before the operator runs: a checkpoint stops recomputing once everything is saved.
    node->save(GatedAttributes(normalized_shape.size(), eps, weight_offset, activation, norm_before_gate), input, gate,
               given_weight);
  }
  Tensor output = redispatch(gated_rms_norm_op(), keys, input, gate, normalized_shape, weight, eps, weight_offset,
                             activation, norm_before_gate);
  if (requires_grad) torch::autograd::set_history(output, node);
  return output;
}

Tensor& gated_rms_norm_out_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& gate,
                                    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                    std::optional<double> eps, double weight_offset, std::string_view activation,
                                    bool norm_before_gate, Tensor& out) {
  constexpr const char* op = "gated_rms_norm";
  check_gated_rms_norm_devices(op, input, gate, weight);
  check_no_grad(op, input, gate, value_or_undefined(weight), out);
  redispatch(gated_rms_norm_out_op(), keys, input, gate, normalized_shape, weight, eps, weight_offset, activation,
             norm_before_gate, out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward_autograd(
    c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input, const Tensor& gate,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
    std::string_view activation, bool norm_before_gate, GatedOutputMask output_mask) {
  check_gated_rms_norm_devices("gated_rms_norm_backward", input, gate, weight, grad_output);
  const Tensor& given_weight = value_or_undefined(weight);
  if (has_tangent(grad_output, input, gate, given_weight)) {
    return gated_rms_norm_backward_composite(grad_output, input, gate, normalized_shape, weight, eps, weight_offset,
                                             activation, norm_before_gate, output_mask);
  }
  auto [grad_input, grad_gate, grad_weight] =
      redispatch(gated_rms_norm_backward_op(), keys, grad_output, input, gate, normalized_shape, weight, eps,
                 weight_offset, activation, norm_before_gate, output_mask);
  if (compute_requires_grad(grad_output, input, gate, given_weight)) {
    auto node = make_node<OperatorNode<GatedRmsNormBackwardGradient>>();
    node->connect(grad_output, input, gate, given_weight);
    node->save(GatedAttributes(normalized_shape.size(), eps, weight_offset, activation, norm_before_gate), grad_output,
               input, gate, given_weight);
    torch::autograd::set_history(grad_input, node);
    torch::autograd::set_history(grad_gate, node);
    torch::autograd::set_history(grad_weight, node);
  }
  return {std::move(grad_input), std::move(grad_gate), std::move(grad_weight)};
}

std::tuple<Tensor&, Tensor&, Tensor&> gated_rms_norm_backward_out_autograd(
    c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input, const Tensor& gate,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
    std::string_view activation, bool norm_before_gate, GatedOutputMask output_mask, Tensor& grad_input,
    Tensor& grad_gate, Tensor& grad_weight) {
  constexpr const char* op = "gated_rms_norm_backward";
  check_gated_rms_norm_devices(op, input, gate, weight, grad_output);
  check_no_grad(op, grad_output, input, gate, value_or_undefined(weight), grad_input, grad_gate, grad_weight);
  redispatch(gated_rms_norm_backward_out_op(), keys, grad_output, input, gate, normalized_shape, weight, eps,
             weight_offset, activation, norm_before_gate, output_mask, grad_input, grad_gate, grad_weight);
  return {grad_input, grad_gate, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, ADInplaceOrView, m) {
  m.impl("gated_rms_norm.out", CountedWrite<gated_rms_norm_out_op, GatedRmsNormOut>::call);
  m.impl("gated_rms_norm_backward.out", CountedWrite<gated_rms_norm_backward_out_op, GatedRmsNormBackwardOut>::call);
}

TORCH_LIBRARY_IMPL(normops, Autograd, m) {
  m.impl("gated_rms_norm", gated_rms_norm_autograd);
  m.impl("gated_rms_norm.out", gated_rms_norm_out_autograd);
  m.impl("gated_rms_norm_backward", gated_rms_norm_backward_autograd);
  m.impl("gated_rms_norm_backward.out", gated_rms_norm_backward_out_autograd);
}

}  // namespace normops
