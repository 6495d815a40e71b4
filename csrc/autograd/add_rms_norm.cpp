// The derivative of add_rms_norm: rms_norm_backward of the sum, which is its output residual_out; input and residual
// receive the same gradient.
#include "../add_rms_norm.h"

#include "../composite/add_rms_norm.h"
#include "../rms_norm.h"
#include "kernels.h"

namespace normops {

template <>
struct Derivative<AddRmsNorm> {
  static constexpr const char* kName = "AddRmsNormBackward";
  static constexpr size_t kSavedOutputs = 1;
  using Saved = RmsNorm;
  static RmsNorm saved(const AddRmsNorm& arguments, const Outputs<AddRmsNorm>& outputs) {
    return {outputs[1], arguments.norm};
  }

  static variable_list backward(const variable_list& grad_outputs, const RmsNorm& saved, const Needed<3>& needed) {
    const Tensor &grad_output = grad_outputs[0], &grad_residual_out = grad_outputs[1];
    Outputs<RmsNormBackward> gradients = {grad_residual_out, Tensor()};
    if (grad_output.defined()) {
      gradients = call(RmsNormBackward{
          grad_output, saved.input, saved.norm, if_defined(grad_residual_out), {needed[0] || needed[1], needed[2]}});
    }
    const auto& [grad_sum, grad_weight] = gradients;
    // Autograd converts it to the input's dtype, where that is another.
    return {needed[0] ? grad_sum : Tensor(), needed[1] ? grad_sum : Tensor(), grad_weight};
  }
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<AddRmsNorm>()); }

}  // namespace normops
