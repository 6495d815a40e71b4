// The derivatives of rms_norm and rms_norm_backward. Nothing is saved but the arguments; rms_norm_backward recomputes
// rstd.
#include "../rms_norm.h"

#include <algorithm>

#include "../composite/composite.h"
#include "kernels.h"

namespace normops {

namespace {

// The saved arguments. Only shape and dtype of the bias are used, so it is detached: writes to it are no error. A bias
// with the shape of input is not saved, as its gradient is that of the output.
struct SavedForRmsNorm {
  const Tensor& input;
  Norm norm;
  OptionalTensor bias;

  auto members() const { return std::tie(input, norm, bias); }
};

bool has_input_shape(const Tensor& bias, const Tensor& input) {
  const auto sizes = bias.sym_sizes(), of_input = input.sym_sizes();
  return std::equal(sizes.begin(), sizes.end(), of_input.begin(), of_input.end(), [](const auto& a, const auto& b) {
    const c10::SymBool is_equal = a.sym_eq(b);
    const auto known = is_equal.maybe_as_bool();  // for sizes of nested tensors, which support no guards
    return known.has_value() ? *known : TORCH_GUARD_OR_FALSE(is_equal);
  });
}

}  // namespace

// The derivative of rms_norm is the operator rms_norm_backward.
template <>
struct Derivative<RmsNorm> {
  static constexpr const char* kName = "RmsNormBackward";
  static constexpr Uses<3, 3> kNeededForGrad = {{
      // depends on: input, weight, bias
      {true, true, false},   // input
      {true, false, false},  // weight
      {false, false, true},  // bias
  }};
  using Saved = SavedForRmsNorm;
  static SavedForRmsNorm saved(const RmsNorm& arguments, const Outputs<RmsNorm>&) {
    const auto& [input, norm, bias] = arguments;
    const bool is_needed = is_given(bias) && bias->requires_grad() && !has_input_shape(*bias, input);
    if (!is_needed) return {input, norm, std::nullopt};
    const at::AutoDispatchBelowADInplaceOrView guard;
    return {input, norm, bias->detach()};
  }
  static SavedForRmsNorm recomputed_from(const RmsNorm& arguments, const Outputs<RmsNorm>&) {
    return {arguments.input, arguments.norm, arguments.bias};
  }
  static Tensor output(const SavedForRmsNorm& saved, const at::TensorOptions&) {
    return call(RmsNorm{saved.input, saved.norm, saved.bias})[0];
  }
  static variable_list backward(const variable_list& grad_outputs, const SavedForRmsNorm& saved,
                                const Needed<3>& needed) {
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

template <>
struct Derivative<RmsNormBackward> {
  static constexpr const char* kName = "RmsNormBackwardBackward";
  static variable_list backward(const variable_list& grad_outputs, const RmsNormBackward& saved, const Needed<5>&) {
    const auto as_computed = [&](const Tensor& tensor) { return to_compute_dtype(tensor, saved.input); };
    const Tensor for_input = as_computed(grad_outputs[0]), for_weight = as_computed(grad_outputs[1]);
    auto [of_dy, of_input, of_weight] = normalize_backward_backward(
        for_input, for_weight, as_computed(saved.grad_output), as_computed(saved.input), saved.norm);
    if (grad_outputs[2].defined()) {
      of_dy = plus(of_dy, as_computed(grad_outputs[2]).expand_symint(saved.input.sym_sizes()));
    }
    return {of_dy, of_input, of_weight, grad_outputs[0], Tensor()};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<RmsNorm, RmsNormBackward>()); }

}  // namespace normops
