// The derivatives of gated_rms_norm and gated_rms_norm_backward. Nothing is saved but the arguments.
#include "../gated_rms_norm.h"

#include "kernels.h"

namespace normops {

template <>
struct Derivative<GatedRmsNorm> {
  static constexpr const char* kName = "GatedRmsNormBackward";
  static constexpr Uses<3, 3> kNeededForGrad = {{
      // depends on: input, gate, weight
      {true, true, true},   // input
      {true, true, true},   // gate
      {true, true, false},  // weight
  }};
  static Tensor output(const GatedRmsNorm& saved, const at::TensorOptions&) { return call(saved)[0]; }
  static variable_list backward(const variable_list& grad_outputs, const GatedRmsNorm& saved, const Needed<3>& needed) {
    const auto& [input, gate, norm, activation, norm_before_gate] = saved;
    return to_list(
        call(GatedRmsNormBackward{grad_outputs[0], input, gate, norm, activation, norm_before_gate, needed}));
  }
};

template <>
struct Derivative<GatedRmsNormBackward> {
  static constexpr const char* kName = "GatedRmsNormBackwardBackward";
  static constexpr Uses<4, 4> kNeededForGrad = {{
      // depends on: grad_output, input, gate, weight
      {false, true, true, true},  // grad_output
      {true, true, true, true},   // input
      {true, true, true, true},   // gate
      {true, true, true, false},  // weight
  }};
};

TORCH_LIBRARY_IMPL(normops, Autograd, m) { register_all<Autograd>(m, List<GatedRmsNorm, GatedRmsNormBackward>()); }

}  // namespace normops
