// Overrides aten::rms_norm, which F.rms_norm and torch.nn.RMSNorm call, by normops::rms_norm.
#include <ATen/OpMathType.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "../rms_norm.h"
#include "../tensor_rows.h"
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

// ONNX export supports torch's composition, not normops::rms_norm. Only tensors with the Python key are exported.
bool is_in_onnx_export(const Tensor& input) {
  if (!input.key_set().has(c10::DispatchKey::Python)) return false;
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("torch.onnx").attr("is_in_onnx_export")().cast<bool>();
}

// On the CPU, torch's rms_norm is a composition. It saves the input as cast to float32, and the weight only if the
// input requires a gradient. So programs may write to these arguments later. normops saves the arguments themselves and
// needs copies to allow that.
void copy_what_torch_copies(Tensor& input, OptionalTensor& weight) {
  if (!input.is_cpu() || !torch::autograd::compute_requires_grad(input, value_or_undefined(weight))) return;
  const bool is_saved = input.requires_grad();
  const bool is_cast = at::toOpMathType(input.scalar_type()) != input.scalar_type();
  if (!is_saved || is_cast) input = input.clone();
  if (!is_saved && is_given(weight)) weight = weight->clone();
}

// On the CPU, torch's rms_norm makes its result contiguous, except that it keeps the order of torch.channels_last.
bool keeps_order(const Tensor& input) {
  const auto format = input.suggest_memory_format();
  return input.is_cpu() && (format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d);
}

bool differ(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) return true;
  for (size_t i = 0; i < a.size(); i++) {
    if (TORCH_GUARD_OR_FALSE(a[i].sym_ne(b[i]))) return true;
  }
  return false;
}

// Returns whether torch's rms_norm accepts the shapes: it has no weight per group.
bool are_valid(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight) {
  const size_t dims = normalized_shape.size();
  return dims > 0 && input.dim() >= static_cast<int64_t>(dims) &&
         !differ(input.sym_sizes().slice(input.dim() - dims), normalized_shape) &&
         (!is_given(weight) || !differ(weight->sym_sizes(), normalized_shape));
}

// Calls torch's rms_norm for arguments that normops does not support, so that it computes the result or raises its own
// error, and for results in the order of torch.channels_last.
Tensor rms_norm_of_torch(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps) {
  const bool has_our_weight = !is_given(weight) || (has_kernels_for(*weight) && weight->device() == input.device());
  const bool is_ours = has_kernels_for(input) && has_our_weight && !(eps.has_value() && std::isnan(*eps)) &&
                       are_valid(input, normalized_shape, weight) && !is_in_onnx_export(input);
  if (!is_ours || keeps_order(input)) {
    return at::compositeimplicitautograd::rms_norm_symint(input, normalized_shape, weight, eps);
  }
  Tensor kept_input = input;
  OptionalTensor kept_weight = weight;
  copy_what_torch_copies(kept_input, kept_weight);
  return std::move(call(RmsNorm{kept_input, {normalized_shape, kept_weight, eps, 0.0, kRoundOnce}, std::nullopt})[0]);
}

}  // namespace

Registration override_torch() {
  return register_kernels("aten", c10::DispatchKey::CompositeImplicitAutograd,
                          [](torch::Library& library) { library.impl("rms_norm", TORCH_FN(rms_norm_of_torch)); });
}

}  // namespace normops::python
