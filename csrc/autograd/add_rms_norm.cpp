// The derivative of add_rms_norm is rms_norm_backward of the sum, its output residual_out. The gradient of residual is
// that of the sum; the gradient of input is alpha times it.
#include "../add_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/new_full.h>

#include "../rms_norm.h"
#include "kernels.h"

namespace normops {

// The saved arguments.
struct AddedNorm {
  const Tensor& input;  // residual_out
  Norm norm;
  double alpha;

  auto members() const { return std::tie(input, norm, alpha); }
};

template <>
struct Derivative<AddRmsNorm> {
  static constexpr const char* kName = "AddRmsNormBackward";
  static constexpr Uses<3, 2> kNeededForGrad = {{
      // depends on: residual_out, weight
      {true, true},   // input
      {true, true},   // residual
      {true, false},  // weight
  }};
  static constexpr size_t kSavedOutputs = 1;
  using Saved = AddedNorm;
  static AddedNorm saved(const AddRmsNorm& arguments, const Outputs<AddRmsNorm>& outputs) {
    return {outputs[1], arguments.norm, arguments.alpha};
  }
  static AddedNorm recomputed_from(const AddRmsNorm& arguments, const Outputs<AddRmsNorm>& outputs) {
    return saved(arguments, outputs);
  }

  // Adding -0 is the identity. With a sum of another dtype, add_rms_norm rounds the norm as the forward did.
  static Tensor output(const AddedNorm& saved, const at::TensorOptions& options) {
    const auto& [input, norm, alpha] = saved;
    if (input.scalar_type() == options.dtype().toScalarType()) return call(RmsNorm{input, norm, std::nullopt})[0];
    const Tensor nothing = input.new_full({}, -0.0, options).expand_symint(input.sym_sizes());
    return call(AddRmsNorm{nothing, input, norm, 1.0})[0];
  }
  static variable_list backward(const variable_list& grad_outputs, const AddedNorm& saved, const Needed<3>& needed) {
    const Tensor &grad_output = grad_outputs[0], &grad_residual_out = grad_outputs[1];
    Outputs<RmsNormBackward> gradients = {grad_residual_out, Tensor(), Tensor()};
    if (grad_output.defined()) {
      gradients = call(RmsNormBackward{grad_output,
                                       saved.input,
                                       saved.norm,
                                       if_defined(grad_residual_out),
                                       std::nullopt,
                                       {needed[0] || needed[1], needed[2], false}});
    }
    const auto& [grad_sum, grad_weight, _] = gradients;
    // Autograd converts it to the dtype of input if they differ.
    const auto grad_input = [&, &grad_sum = grad_sum] {
      return saved.alpha == 1.0 ? grad_sum : grad_sum * saved.alpha;
    };
    return {needed[0] ? grad_input() : Tensor(), needed[1] ? grad_sum : Tensor(), grad_weight};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<AddRmsNorm>()); }

}  // namespace normops
