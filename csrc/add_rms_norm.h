// add_rms_norm as the rest of the C++ code sees it, see rms_norm.h. Its backward is rms_norm_backward, with the sum as
// input and the gradient of residual_out as grad_residual.
#pragma once
#include <tuple>

#include "check.h"
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

void check_add_rms_norm(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                        const OptionalTensor& weight, std::optional<double> eps);

void check_add_rms_norm_out(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, std::optional<double> eps, const Tensor& out,
                            const Tensor& residual_out);

// For add_rms_norm_, whose outputs are its inputs.
void check_add_rms_norm_inplace(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, std::optional<double> eps);

void check_add_rms_norm_devices(const char* op, const Tensor& input, const Tensor& residual,
                                const OptionalTensor& weight);

using AddRmsNorm = std::tuple<Tensor, Tensor>(const Tensor& input, const Tensor& residual,
                                              c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                              std::optional<double> eps, double weight_offset);
using AddRmsNormOut = std::tuple<Tensor&, Tensor&>(const Tensor& input, const Tensor& residual,
                                                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                   std::optional<double> eps, double weight_offset, Tensor& out,
                                                   Tensor& residual_out);
using AddRmsNormInplace = void(Tensor& input, Tensor& residual, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps, double weight_offset);

const c10::TypedOperatorHandle<AddRmsNorm>& add_rms_norm_op();
const c10::TypedOperatorHandle<AddRmsNormOut>& add_rms_norm_out_op();
const c10::TypedOperatorHandle<AddRmsNormInplace>& add_rms_norm_inplace_op();

}  // namespace normops
#pragma GCC visibility pop
