// gated_rms_norm and gated_rms_norm_backward as the rest of the C++ code sees them, see rms_norm.h.
#pragma once
#include <array>
#include <string_view>
#include <tuple>

#include "check.h"
#include "gating.h"
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

using GatedOutputMask = std::array<bool, 3>;  // grad_input, grad_gate, grad_weight

// Throws, as the checks do, if there is none of this name.
Activation find_activation(const char* op, std::string_view name);

// The checks return what they make of activation and norm_before_gate.
Gating check_gated_rms_norm(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, std::optional<double> eps, std::string_view activation,
                            bool norm_before_gate);

Gating check_gated_rms_norm_out(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps, std::string_view activation,
                                bool norm_before_gate, const Tensor& out);

Gating check_gated_rms_norm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                     c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                     std::optional<double> eps, std::string_view activation, bool norm_before_gate);

// A gradient that output_mask leaves out, or that has no weight to belong to, is neither checked nor written.
Gating check_gated_rms_norm_backward_out(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                                         c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                         std::optional<double> eps, std::string_view activation, bool norm_before_gate,
                                         GatedOutputMask output_mask, const Tensor& grad_input, const Tensor& grad_gate,
                                         const Tensor& grad_weight);

// `op` is gated_rms_norm or gated_rms_norm_backward, which alone has a grad_output.
void check_gated_rms_norm_devices(const char* op, const Tensor& input, const Tensor& gate, const OptionalTensor& weight,
                                  const OptionalTensor& grad_output = std::nullopt);

using GatedRmsNorm = Tensor(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                            std::string_view activation, bool norm_before_gate);
using GatedRmsNormOut = Tensor&(const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                                std::string_view activation, bool norm_before_gate, Tensor& out);
using GatedRmsNormBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor& grad_output, const Tensor& input,
                                                                const Tensor& gate,
                                                                c10::SymIntArrayRef normalized_shape,
                                                                const OptionalTensor& weight, std::optional<double> eps,
                                                                double weight_offset, std::string_view activation,
                                                                bool norm_before_gate, GatedOutputMask output_mask);
using GatedRmsNormBackwardOut = std::tuple<Tensor&, Tensor&, Tensor&>(
    const Tensor& grad_output, const Tensor& input, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, std::string_view activation,
    bool norm_before_gate, GatedOutputMask output_mask, Tensor& grad_input, Tensor& grad_gate, Tensor& grad_weight);

const c10::TypedOperatorHandle<GatedRmsNorm>& gated_rms_norm_op();
const c10::TypedOperatorHandle<GatedRmsNormOut>& gated_rms_norm_out_op();
const c10::TypedOperatorHandle<GatedRmsNormBackward>& gated_rms_norm_backward_op();
const c10::TypedOperatorHandle<GatedRmsNormBackwardOut>& gated_rms_norm_backward_out_op();

}  // namespace normops
#pragma GCC visibility pop
