// rms_norm and rms_norm_backward as the rest of the C++ code sees them: their arguments' checks and their dispatcher
// entries.
#pragma once
#include <array>
#include <tuple>

#include "check.h"
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

using OutputMask = std::array<bool, 2>;  // grad_input, grad_weight

void check_rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    std::optional<double> eps);

void check_rms_norm_out(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        std::optional<double> eps, const Tensor& out);

// For rms_norm_, whose output is its input.
void check_rms_norm_inplace(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                            std::optional<double> eps);

void check_rms_norm_backward(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor& weight, std::optional<double> eps,
                             const OptionalTensor& grad_residual);

// A gradient that output_mask leaves out, or that has no weight to belong to, is neither checked nor written.
void check_rms_norm_backward_out(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, std::optional<double> eps,
                                 const OptionalTensor& grad_residual, OutputMask output_mask, const Tensor& grad_input,
                                 const Tensor& grad_weight);

// The part of the checks that autograd's kernels make, as below them a fake tensor no longer shows its device.
void check_rms_norm_devices(const char* op, const Tensor& input, const OptionalTensor& weight);
void check_rms_norm_backward_devices(const Tensor& grad_output, const Tensor& input, const OptionalTensor& weight,
                                     const OptionalTensor& grad_residual);

using RmsNorm = Tensor(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       std::optional<double> eps, double weight_offset);
using RmsNormOut = Tensor&(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           std::optional<double> eps, double weight_offset, Tensor& out);
using RmsNormInplace = Tensor&(Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                               std::optional<double> eps, double weight_offset);
using RmsNormBackward = std::tuple<Tensor, Tensor>(const Tensor& grad_output, const Tensor& input,
                                                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                   std::optional<double> eps, double weight_offset,
                                                   const OptionalTensor& grad_residual, OutputMask output_mask);
using RmsNormBackwardOut = std::tuple<Tensor&, Tensor&>(const Tensor& grad_output, const Tensor& input,
                                                        c10::SymIntArrayRef normalized_shape,
                                                        const OptionalTensor& weight, std::optional<double> eps,
                                                        double weight_offset, const OptionalTensor& grad_residual,
                                                        OutputMask output_mask, Tensor& grad_input,
                                                        Tensor& grad_weight);

const c10::TypedOperatorHandle<RmsNorm>& rms_norm_op();
const c10::TypedOperatorHandle<RmsNormOut>& rms_norm_out_op();
const c10::TypedOperatorHandle<RmsNormInplace>& rms_norm_inplace_op();
const c10::TypedOperatorHandle<RmsNormBackward>& rms_norm_backward_op();
const c10::TypedOperatorHandle<RmsNormBackwardOut>& rms_norm_backward_out_op();

}  // namespace normops
#pragma GCC visibility pop
