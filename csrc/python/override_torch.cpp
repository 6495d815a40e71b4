// Overrides aten::rms_norm, which F.rms_norm and torch.nn.RMSNorm call, by normops::rms_norm.
#include <ATen/OpMathType.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <vector>

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

// Returns the memory order of torch's product of input and rstd, outermost dimension first: TensorIterator orders it by
// the input's strides. A stride of 0 defines no order.
std::vector<int64_t> memory_order_of(const Tensor& input) {
  const auto sizes = input.sym_sizes(), strides = input.sym_strides();
  const auto compare = [&](int64_t a, int64_t b) {  // 1: b is inside of a; -1: a is inside of b; 0: unknown
    if (TORCH_GUARD_OR_FALSE(strides[a].sym_eq(0)) || TORCH_GUARD_OR_FALSE(strides[b].sym_eq(0))) return 0;
    if (TORCH_GUARD_OR_FALSE(strides[a].sym_lt(strides[b]))) return -1;
    if (TORCH_GUARD_OR_FALSE(strides[a].sym_gt(strides[b]))) return 1;
    return TORCH_GUARD_OR_FALSE(sizes[a].sym_gt(sizes[b])) ? 1 : 0;
  };
  std::vector<int64_t> order(input.dim());  // the innermost first
  for (int64_t i = 0; i < input.dim(); i++) order[i] = input.dim() - 1 - i;
  for (int64_t i = 1; i < input.dim(); i++) {
    int64_t place = i;
    for (int64_t inner = i - 1; inner >= 0; inner--) {
      const int compared = compare(order[inner], order[place]);
      if (compared < 0) break;
      if (compared == 0) continue;
      std::swap(order[inner], order[place]);
      place = inner;
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

// On the CPU, torch's rms_norm makes its result contiguous, except that it keeps the order of torch.channels_last. A
// product that is contiguous already keeps the strides of its dimensions of size 1.
bool keeps_order(const Tensor& input, const std::vector<int64_t>& order) {
  if (std::is_sorted(order.begin(), order.end())) return false;
  const auto format = input.suggest_memory_format();
  if (format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d) return true;
  std::vector<int64_t> longer = order;
  std::erase_if(longer, [&](int64_t dim) { return TORCH_GUARD_OR_FALSE(input.sym_size(dim).sym_eq(1)); });
  return std::is_sorted(longer.begin(), longer.end());
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

// Calls torch's rms_norm for arguments that normops does not support: it computes the result or raises its own error.
Tensor rms_norm_of_torch(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps) {
  const bool has_our_weight = !is_given(weight) || (has_kernels_for(*weight) && weight->device() == input.device());
  const bool is_ours = has_kernels_for(input) && has_our_weight && !(eps.has_value() && std::isnan(*eps)) &&
                       are_valid(input, normalized_shape, weight) && !is_in_onnx_export(input);
  const auto of_torch = [&] {
    return at::compositeimplicitautograd::rms_norm_symint(input, normalized_shape, weight, eps);
  };
  if (!is_ours) return of_torch();
  const auto order = input.is_cpu() ? memory_order_of(input) : std::vector<int64_t>();
  const bool is_permuted = input.is_cpu() && keeps_order(input, order);
  // Kernels normalize innermost dimensions.
  for (int64_t i = 0; is_permuted && i < std::min<int64_t>(normalized_shape.size(), input.dim()); i++) {
    const int64_t dim = input.dim() - 1 - i;
    if (order[dim] != dim) return of_torch();
  }
  Tensor kept_input = is_permuted ? input.permute(order) : input;
  OptionalTensor kept_weight = weight;
  copy_what_torch_copies(kept_input, kept_weight);
  Tensor output =
      std::move(call(RmsNorm{kept_input, {normalized_shape, kept_weight, eps, 0.0, kRoundOnce}, std::nullopt})[0]);
  if (!is_permuted) return output;
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); i++) back[order[i]] = static_cast<int64_t>(i);
  return output.permute(back);
}

}  // namespace

Registration override_torch() {
  return register_kernels("aten", c10::DispatchKey::CompositeImplicitAutograd,
                          [](torch::Library& library) { library.impl("rms_norm", TORCH_FN(rms_norm_of_torch)); });
}

}  // namespace normops::python
