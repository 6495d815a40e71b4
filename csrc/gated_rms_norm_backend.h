// The operators of gated_rms_norm for a backend that has kernels of its own, see rms_norm_backend.h.
#pragma once
#include <torch/library.h>

#include "gated_rms_norm.h"

namespace normops {

// Backend has Guard, empty_contiguous(like), and, on arguments that have elements, where an undefined gradient is not
// wanted (not all of them),
//   launch(input, gate, normalized_dims, weight, eps, weight_offset, gating, output)
//   launch_backward(grad_output, input, gate, normalized_dims, weight, eps, weight_offset, gating, grad_input,
//                   grad_gate, grad_weight)
template <class Backend>
struct GatedRmsNormOperators {
  static Tensor gated_rms_norm(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                               std::string_view activation, bool norm_before_gate) {
    const Gating gating =
        check_gated_rms_norm(input, gate, normalized_shape, weight, eps, activation, norm_before_gate);
    const typename Backend::Guard guard(input.device());
    Tensor output = Backend::empty_contiguous(input);
    if (input.numel() > 0)
      Backend::launch(input, gate, normalized_shape.size(), weight, eps, weight_offset, gating, output);
    return output;
  }

  static Tensor& gated_rms_norm_out(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                    const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                    std::string_view activation, bool norm_before_gate, Tensor& out) {
    const Gating gating =
        check_gated_rms_norm_out(input, gate, normalized_shape, weight, eps, activation, norm_before_gate, out);
    const typename Backend::Guard guard(input.device());
    if (input.numel() > 0)
      Backend::launch(input, gate, normalized_shape.size(), weight, eps, weight_offset, gating, out);
    return out;
  }

  static std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
      const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
      bool norm_before_gate, GatedOutputMask output_mask) {
    const Gating gating = check_gated_rms_norm_backward(grad_output, input, gate, normalized_shape, weight, eps,
                                                        activation, norm_before_gate);
    const typename Backend::Guard guard(input.device());
    Tensor grad_input, grad_gate, grad_weight;
    if (output_mask[0]) grad_input = Backend::empty_contiguous(input);
    if (output_mask[1]) grad_gate = Backend::empty_contiguous(gate);
    if (output_mask[2] && is_given(weight)) grad_weight = Backend::empty_contiguous(*weight);
    run_backward(grad_output, input, gate, normalized_shape.size(), weight, eps, weight_offset, gating, grad_input,
                 grad_gate, grad_weight);
    return {grad_input, grad_gate, grad_weight};
  }

  static std::tuple<Tensor&, Tensor&, Tensor&> gated_rms_norm_backward_out(
      const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
      const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
      bool norm_before_gate, GatedOutputMask output_mask, Tensor& grad_input, Tensor& grad_gate, Tensor& grad_weight) {
    const Gating gating =
        check_gated_rms_norm_backward_out(grad_output, input, gate, normalized_shape, weight, eps, activation,
                                          norm_before_gate, output_mask, grad_input, grad_gate, grad_weight);
    const typename Backend::Guard guard(input.device());
    const bool wants_weight = output_mask[2] && is_given(weight);
    run_backward(grad_output, input, gate, normalized_shape.size(), weight, eps, weight_offset, gating,
                 output_mask[0] ? grad_input : Tensor(), output_mask[1] ? grad_gate : Tensor(),
                 wants_weight ? grad_weight : Tensor());
    return {grad_input, grad_gate, grad_weight};
  }

  static void run_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate, size_t normalized_dims,
                           const OptionalTensor& weight, std::optional<double> eps, double weight_offset, Gating gating,
                           const Tensor& grad_input, const Tensor& grad_gate, const Tensor& grad_weight) {
    if (!grad_input.defined() && !grad_gate.defined() && !grad_weight.defined()) return;
    if (input.numel() > 0) {
      Backend::launch_backward(grad_output, input, gate, normalized_dims, weight, eps, weight_offset, gating,
                               grad_input, grad_gate, grad_weight);
    } else if (grad_weight.defined()) {
      grad_weight.zero_();  // a sum over no rows
    }
  }

  static void register_in(torch::Library& m) {
    m.impl("gated_rms_norm", &gated_rms_norm);
    m.impl("gated_rms_norm.out", &gated_rms_norm_out);
    m.impl("gated_rms_norm_backward", &gated_rms_norm_backward);
    m.impl("gated_rms_norm_backward.out", &gated_rms_norm_backward_out);
  }
};

}  // namespace normops
