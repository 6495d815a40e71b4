// The operators of rms_norm for a backend that has kernels of its own: what to check and to allocate around them.
#pragma once
#include <torch/library.h>

#include "rms_norm.h"

namespace normops {

// Backend has, besides
//   Guard, made of the input's device and kept while kernels are launched, and
//   empty_contiguous(like),
// these, on arguments that passed the check and have elements, where an undefined gradient is not wanted (not both):
//   launch(input, normalized_dims, weight, eps, weight_offset, output)
//   launch_backward(grad_output, input, normalized_dims, weight, eps, weight_offset, grad_residual, grad_input,
//                   grad_weight)
template <class Backend>
struct RmsNormOperators {
  static Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps, double weight_offset) {
    check_rms_norm(input, normalized_shape, weight, eps);
    const typename Backend::Guard guard(input.device());
    Tensor output = Backend::empty_contiguous(input);
    if (input.numel() > 0) Backend::launch(input, normalized_shape.size(), weight, eps, weight_offset, output);
    return output;
  }

  static Tensor& rms_norm_out(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                              std::optional<double> eps, double weight_offset, Tensor& out) {
    check_rms_norm_out(input, normalized_shape, weight, eps, out);
    const typename Backend::Guard guard(input.device());
    if (input.numel() > 0) Backend::launch(input, normalized_shape.size(), weight, eps, weight_offset, out);
    return out;
  }

  static Tensor& rms_norm_inplace(Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                  std::optional<double> eps, double weight_offset) {
    check_rms_norm_inplace(input, normalized_shape, weight, eps);
    const typename Backend::Guard guard(input.device());
    if (input.numel() > 0) Backend::launch(input, normalized_shape.size(), weight, eps, weight_offset, input);
    return input;
  }

  static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_output, const Tensor& input,
                                                      c10::SymIntArrayRef normalized_shape,
                                                      const OptionalTensor& weight, std::optional<double> eps,
                                                      double weight_offset, const OptionalTensor& grad_residual,
                                                      OutputMask output_mask) {
    check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
    const typename Backend::Guard guard(input.device());
    Tensor grad_input, grad_weight;
    if (output_mask[0]) grad_input = Backend::empty_contiguous(input);
    if (output_mask[1] && is_given(weight)) grad_weight = Backend::empty_contiguous(*weight);
    run_backward(grad_output, input, normalized_shape.size(), weight, eps, weight_offset, grad_residual, grad_input,
                 grad_weight);
    return {grad_input, grad_weight};
  }

  static std::tuple<Tensor&, Tensor&> rms_norm_backward_out(const Tensor& grad_output, const Tensor& input,
                                                            c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, std::optional<double> eps,
                                                            double weight_offset, const OptionalTensor& grad_residual,
                                                            OutputMask output_mask, Tensor& grad_input,
                                                            Tensor& grad_weight) {
    check_rms_norm_backward_out(grad_output, input, normalized_shape, weight, eps, grad_residual, output_mask,
                                grad_input, grad_weight);
    const typename Backend::Guard guard(input.device());
    const bool wants_weight = output_mask[1] && is_given(weight);
    run_backward(grad_output, input, normalized_shape.size(), weight, eps, weight_offset, grad_residual,
                 output_mask[0] ? grad_input : Tensor(), wants_weight ? grad_weight : Tensor());
    return {grad_input, grad_weight};
  }

  static void run_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                           const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                           const OptionalTensor& grad_residual, const Tensor& grad_input, const Tensor& grad_weight) {
    if (!grad_input.defined() && !grad_weight.defined()) return;
    if (input.numel() > 0) {
      Backend::launch_backward(grad_output, input, normalized_dims, weight, eps, weight_offset, grad_residual,
                               grad_input, grad_weight);
    } else if (grad_weight.defined()) {
      grad_weight.zero_();  // a sum over no rows
    }
  }

  static void register_in(torch::Library& m) {
    m.impl("rms_norm", &rms_norm);
    m.impl("rms_norm.out", &rms_norm_out);
    m.impl("rms_norm_", &rms_norm_inplace);
    m.impl("rms_norm_backward", &rms_norm_backward);
    m.impl("rms_norm_backward.out", &rms_norm_backward_out);
  }
};

}  // namespace normops
