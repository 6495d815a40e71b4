// aten::rms_norm, which F.rms_norm and torch.nn.RMSNorm call, as a call of normops::rms_norm.
#include <ATen/OpMathType.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "../problem.h"
#include "../rms_norm.h"
#include "registration.h"

namespace normops::python {
namespace {

bool takes_operators(const Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return true;
  const pybind11::gil_scoped_acquire gil;
  const auto takes_operators = pybind11::module_::import("normops._operators").attr("takes_operators");
  return takes_operators(pybind11::type::of(pybind11::cast(tensor))).cast<bool>();
}

bool has_kernels_for(const Tensor& tensor) {
  return find_dtype(tensor.scalar_type()).has_value() && tensor.layout() == at::kStrided &&
         (tensor.is_cpu() || tensor.is_cuda()) && takes_operators(tensor);
}

// ONNX knows what torch's own is made of, and not ours. Only what Python traces asks.
bool is_in_onnx_export(const Tensor& input) {
  if (!input.key_set().has(c10::DispatchKey::Python)) return false;
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("torch.onnx").attr("is_in_onnx_export")().cast<bool>();
}

// On the CPU torch's own is a composition, which saves for the backward the input as cast to float32, and the weight
// only where the input needs a gradient. A program may therefore write to them, which ours, saving the arguments, would
// refuse.
void copy_what_torch_copies(Tensor& input, OptionalTensor& weight) {
  if (!input.is_cpu() || !torch::autograd::compute_requires_grad(input, value_or_undefined(weight))) return;
  const bool is_saved = input.requires_grad();
  const bool is_cast = at::toOpMathType(input.scalar_type()) != input.scalar_type();
  if (!is_saved || is_cast) input = input.clone();
  if (!is_saved && is_given(weight)) weight = weight->clone();
}

// What torch's own may take and ours does not is torch's: it computes, or refuses in its own words.
Tensor rms_norm_of_torch(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps) {
  // torch's has no weight per group.
  const bool has_our_weight =
      !is_given(weight) || (has_kernels_for(*weight) && weight->dim() == static_cast<int64_t>(normalized_shape.size()));
  const bool is_ours =
      has_kernels_for(input) && has_our_weight && !(eps.has_value() && std::isnan(*eps)) && !is_in_onnx_export(input);
  if (!is_ours) return at::compositeimplicitautograd::rms_norm_symint(input, normalized_shape, weight, eps);
  Tensor kept_input = input;
  OptionalTensor kept_weight = weight;
  copy_what_torch_copies(kept_input, kept_weight);
  return std::move(call(RmsNorm{kept_input, {normalized_shape, kept_weight, eps, 0.0, kNoCasting}, std::nullopt})[0]);
}

}  // namespace

Registration override_torch() {
  return register_kernels("aten", c10::DispatchKey::CompositeImplicitAutograd,
                          [](torch::Library& library) { library.impl("rms_norm", TORCH_FN(rms_norm_of_torch)); });
}

}  // namespace normops::python
