// The derivatives of rms_norm_stats and rms_norm_from_stats. Their backwards have none: if a gradient of those is
// requested, autograd records the definition. For a row, h is the input, w the weight
// with its offset, n the size, s the sum of h^2, and d the sum of g h:
//     r = 1 / sqrt(s / n + eps)           g = dy w
//     output = h r w                      grad_input = r g - r^3 (d / n) h     grad_weight = sum over rows of dy h r
#include "../rms_norm_stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include "../composite/composite.h"
#include "kernels.h"

namespace normops {
namespace {

// Converts the gradient of r to the gradient of s: dr/ds = -r^3 / (2 n).
Tensor through_rstd(const Tensor& for_r, const Tensor& square_sum, const c10::SymInt& size, const Norm& norm) {
  return -0.5 * for_r * rstd_of_sums(square_sum, size, norm).pow(3) / c10::Scalar(size);
}

}  // namespace

template <>
struct Derivative<RmsNormStats> {
  static constexpr const char* kName = "RmsNormStatsBackward";
  static constexpr Uses<1, 1> kNeededForGrad = {{
      // depends on: input
      {true},  // input
  }};
  static variable_list backward(const variable_list& grad_outputs, const RmsNormStats& saved, const Needed<1>&) {
    const auto& [input, normalized_shape] = saved;
    const Tensor for_h =
        2 * unsqueeze_to_rows(grad_outputs[0], normalized_shape.size()) * to_compute_dtype(input, input);
    return {for_h.to(input.scalar_type())};
  }
};

// Calls the backward operators: for the gradient of s with d, and for that of h with d = 0, as if r were a constant.
template <>
struct Derivative<RmsNormFromStats> {
  static constexpr const char* kName = "RmsNormFromStatsBackward";
  static constexpr Uses<3, 3> kNeededForGrad = {{
      // depends on: input, square_sum, weight
      {false, true, true},  // input
      {true, true, true},   // square_sum
      {true, true, false},  // weight
  }};
  static Tensor output(const RmsNormFromStats& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const RmsNormFromStats& saved,
                                const Needed<3>& needed) {
    const auto& [input, square_sum, norm, size] = saved;
    const Tensor& grad_output = grad_outputs[0];
    variable_list result(needed.size());
    if (needed[1]) {
      const Tensor dot = call(RmsNormBackwardStats{grad_output, input, norm})[1];
      result[1] = through_rstd(dot, square_sum, size, norm);
    }
    if (needed[0] || needed[2]) {
      const Tensor none = at::zeros_like(square_sum);
      auto gradients = call(RmsNormBackwardFromStats{
          grad_output, input, square_sum, none, norm, std::nullopt, {needed[0], needed[2]}, size});
      result[0] = std::move(gradients[0]), result[2] = std::move(gradients[1]);
    }
    return result;
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) {
  register_all<Autograd>(m, List<RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>());
}

}  // namespace normops
