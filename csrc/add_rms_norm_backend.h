// The operators of add_rms_norm for a backend that has kernels of its own, see rms_norm_backend.h.
#pragma once
#include <torch/library.h>

#include "add_rms_norm.h"

namespace normops {

// Backend has Guard, empty_contiguous(like), and, on arguments that have elements,
//   launch(input, residual, normalized_dims, weight, eps, weight_offset, output, residual_out)
template <class Backend>
struct AddRmsNormOperators {
  static std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                 std::optional<double> eps, double weight_offset) {
    check_add_rms_norm(input, residual, normalized_shape, weight, eps);
    const typename Backend::Guard guard(input.device());
    Tensor output = Backend::empty_contiguous(input), residual_out = Backend::empty_contiguous(residual);
    if (input.numel() > 0)
      Backend::launch(input, residual, normalized_shape.size(), weight, eps, weight_offset, output, residual_out);
    return {output, residual_out};
  }

  static std::tuple<Tensor&, Tensor&> add_rms_norm_out(const Tensor& input, const Tensor& residual,
                                                       c10::SymIntArrayRef normalized_shape,
                                                       const OptionalTensor& weight, std::optional<double> eps,
                                                       double weight_offset, Tensor& out, Tensor& residual_out) {
    check_add_rms_norm_out(input, residual, normalized_shape, weight, eps, out, residual_out);
    const typename Backend::Guard guard(input.device());
    if (input.numel() > 0)
      Backend::launch(input, residual, normalized_shape.size(), weight, eps, weight_offset, out, residual_out);
    return {out, residual_out};
  }

  static void add_rms_norm_inplace(Tensor& input, Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                   const OptionalTensor& weight, std::optional<double> eps, double weight_offset) {
    check_add_rms_norm_inplace(input, residual, normalized_shape, weight, eps);
    const typename Backend::Guard guard(input.device());
    if (input.numel() > 0)
      Backend::launch(input, residual, normalized_shape.size(), weight, eps, weight_offset, input, residual);
  }

  static void register_in(torch::Library& m) {
    m.impl("add_rms_norm", &add_rms_norm);
    m.impl("add_rms_norm.out", &add_rms_norm_out);
    m.impl("add_rms_norm_", &add_rms_norm_inplace);
  }
};

}  // namespace normops
