// The derivatives of rms_norm and rms_norm_backward. Nothing is saved but the arguments; rms_norm_backward recomputes
// rstd.
#include "rms_norm.h"

#include <ATen/TensorOperators.h>

#include <algorithm>

#include "../composite/rms_norm.h"
#include "../problem.h"

namespace normops {

namespace {

// What the derivative needs, as arguments of an operator. Of the bias that is its shape and its dtype: writes to it are
// not noticed. None of one with the shape of input: its gradient is that of the output.
struct KeptNorm {
  const Tensor& input;
  Norm norm;
  OptionalTensor bias;

  auto members() const { return std::tie(input, norm, bias); }
};

bool is_of_rows(const Tensor& bias, const Tensor& input) {
  const auto sizes = bias.sym_sizes(), of_input = input.sym_sizes();
  return std::equal(sizes.begin(), sizes.end(), of_input.begin(), of_input.end(), [](const auto& a, const auto& b) {
    const c10::SymBool is_equal = a.sym_eq(b);
    const auto known = is_equal.maybe_as_bool();  // of the sizes of nested tensors, which can say no more
    return known.has_value() ? *known : TORCH_GUARD_OR_FALSE(is_equal);
  });
}

}  // namespace

// The derivative of rms_norm is the operator rms_norm_backward.
template <>
struct Derivative<RmsNorm> {
  static constexpr const char* kName = "RmsNormBackward";
  static constexpr Uses<3, 3> kUses = {{
      // by input, weight, bias
      {true, true, false},   // input
      {true, false, false},  // weight
      {false, false, true},  // bias
  }};
  using Saved = KeptNorm;
  static KeptNorm saved(const RmsNorm& arguments, const Outputs<RmsNorm>&) {
    const auto& [input, norm, bias] = arguments;
    const bool is_needed = is_given(bias) && bias->requires_grad() && !is_of_rows(*bias, input);
    if (!is_needed) return {input, norm, std::nullopt};
    const at::AutoDispatchBelowADInplaceOrView guard;
    return {input, norm, bias->detach()};
  }
  static KeptNorm sources(const RmsNorm& arguments, const Outputs<RmsNorm>&) {
    return {arguments.input, arguments.norm, arguments.bias};
  }
  static Tensor output(const KeptNorm& saved, const at::TensorOptions&) {
    return call(RmsNorm{saved.input, saved.norm, saved.bias})[0];
  }
  static variable_list backward(const variable_list& grad_outputs, const KeptNorm& saved, const Needed<3>& needed) {
    const auto& [input, norm, bias] = saved;
    const bool has_bias = is_given(bias), is_output = needed[2] && !has_bias;
    const Needed<3> wanted = {needed[0], needed[1], needed[2] && has_bias};
    Outputs<RmsNormBackward> gradients;
    if (wanted != Needed<3>()) {
      gradients =
          call(RmsNormBackward{grad_outputs[0], input, norm, std::nullopt, wanted[2] ? bias : std::nullopt, wanted});
    }
    if (is_output) gradients[2] = grad_outputs[0];
    return to_list(std::move(gradients));
  }
};

variable_list Derivative<RmsNormBackward>::backward(const variable_list& grad_outputs, const RmsNormBackward& saved,
                                                    const Needed<5>& needed) {
  variable_list result(needed.size());
  if (!grad_outputs[0].defined() && !grad_outputs[1].defined() && !grad_outputs[2].defined()) return result;
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
  if (grad_outputs[2].defined()) {
    const Tensor through_bias = to_compute_dtype(grad_outputs[2], input).expand_symint(input.sym_sizes());
    for_grad_output = for_grad_output.defined() ? for_grad_output + through_bias : through_bias;
  }
  if (needed[0]) result[0] = for_grad_output.to(grad_output.scalar_type());
  if (needed[1] && for_input.defined()) result[1] = for_input.to(input.scalar_type());
  if (for_weight.defined()) result[2] = for_weight.to(weight.scalar_type());
  return result;
}

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNorm, RmsNormBackward>()); }

}  // namespace normops
