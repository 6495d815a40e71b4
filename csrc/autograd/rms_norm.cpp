// The derivatives of rms_norm and rms_norm_backward. Nothing is saved but the arguments; rms_norm_backward recomputes
// rstd.
#include "rms_norm.h"

#include <ATen/TensorOperators.h>

#include "../composite/rms_norm.h"
#include "../problem.h"

namespace normops {

// The derivative of rms_norm is the operator rms_norm_backward.
template <>
struct Derivative<RmsNorm> {
  static constexpr const char* kName = "RmsNormBackward";
  static constexpr Uses<2, 2> kUses = {{
      // by input, weight
      {true, true},   // input
      {true, false},  // weight
  }};
  static Tensor output(const RmsNorm& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const RmsNorm& saved, const Needed<2>& needed) {
    return to_list(call(RmsNormBackward{grad_outputs[0], saved.input, saved.norm, std::nullopt, needed}));
  }
};

variable_list Derivative<RmsNormBackward>::backward(const variable_list& grad_outputs, const RmsNormBackward& saved,
                                                    const Needed<4>& needed) {
  variable_list result(needed.size());
  if (!grad_outputs[0].defined() && !grad_outputs[1].defined()) return result;
  const auto& [normalized_shape, given_weight, eps, weight_offset, casting_mode] = saved.norm;
  const Tensor &grad_output = saved.grad_output, &input = saved.input, &weight = value_or_undefined(given_weight);
  const auto mean = [dims = saved.norm.dims()](const Tensor& tensor) { return mean_of_rows(tensor, dims); };

  const Tensor dy = to_compute_dtype(grad_output, input), h = to_compute_dtype(input, input);
  const Tensor r = rstd_of_rows(h, saved.norm.dims(), resolve_eps(eps, input.scalar_type()));
  const Tensor w = weight.defined() ? to_compute_dtype(weight, input) + weight_offset : Tensor();
  Tensor for_grad_output, for_input, for_weight;

  if (grad_outputs[0].defined()) {
    const Tensor u = to_compute_dtype(grad_outputs[0], input);
    const Tensor r2 = r * r;
    const Tensor projected =
        r * (u - r2 * h * mean(u * h));  // what g receives: the map from g to grad_input is symmetric
    const Tensor g = w.defined() ? dy * w : dy;
    const Tensor gh = mean(g * h), uh = mean(u * h), ug = mean(u * g);
    for_grad_output = w.defined() ? projected * w : projected;
    for_input = -(r2 * r) * (h * (ug - 3 * r2 * gh * uh) + u * gh + g * uh);
    if (weight.defined() && needed[2]) for_weight = sum_over_rows(dy * projected, weight);
    if (needed[3]) result[3] = grad_outputs[0];
  }
  if (grad_outputs[1].defined()) {
    const Tensor v = to_compute_dtype(grad_outputs[1], input);
    const Tensor through_weight = v * h * r;
    const Tensor through_rstd = r * (v * dy - r * r * h * mean(v * dy * h));
    for_grad_output = for_grad_output.defined() ? for_grad_output + through_weight : through_weight;
    for_input = for_input.defined() ? for_input + through_rstd : through_rstd;
  }
  if (needed[0]) result[0] = for_grad_output.to(grad_output.scalar_type());
  if (needed[1]) result[1] = for_input.to(input.scalar_type());
  if (for_weight.defined()) result[2] = for_weight.to(weight.scalar_type());
  return result;
}

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNorm, RmsNormBackward>()); }

}  // namespace normops
