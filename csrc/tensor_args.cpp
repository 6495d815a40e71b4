#include "tensor_args.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>

namespace normops {
namespace {

// Orders the dimensions of rows, those first that the weight broadcasts over: then row r belongs to group r % groups.
c10::DimVector dims_by_group(const Tensor& input, const Tensor& weight, int64_t row_dims) {
  const int64_t missing = input.dim() - weight.dim();
  c10::DimVector order(row_dims);
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(),
                        [&](int64_t d) { return d < missing || weight.size(d - missing) != input.size(d); });
  return order;
}

}  // namespace

TensorArgs::TensorArgs(const Tensor& input, const Norm& norm, int64_t dim, const Requirements& requirements)
    : KernelArgs(), input_(input), normalized_dims_(norm.dims()), dim_(dim), requirements_(requirements) {
  cols = size = c10::multiply_integers(dim == 0 ? input.sizes().slice(input.dim() - norm.dims())
                                                : input.sizes().slice(input.dim() + dim, 1));
  rows = input.numel() / cols;
  eps = resolve_eps(norm.eps, input.scalar_type());
  rounding = norm.parsed_rounding();
  weight.groups = 1;
  if (!is_given(norm.weight)) return;
  weight.offset = norm.weight_offset == 0 ? -0.0 : norm.weight_offset;
  if (!has_channels()) group_by(*norm.weight);
}

void TensorArgs::set_channels(std::string_view activation) {
  channels.dtype = dtype_of(input_);
  channels.positions = c10::multiply_integers(input_.sizes().slice(input_.dim() + dim_ + 1));
  if (const auto kind = find_activation(activation); kind.has_value()) {
    channels.is_activated = true, gating.activation = *kind;
  }
}

// Passes a full-size weight as a gate. Without a weight, groups rows by the bias if its gradient is wanted.
void TensorArgs::modulate(const Norm& norm, const Tensor& last_output) {
  weight_has_all_rows_ = !requirements_.by_groups && has_all_rows(norm, input_);
  if (weight_has_all_rows_) weight.groups = 1, order_.clear(), gating.norm_before_gate = true;
  if (last_output.defined() && !is_given(norm.weight) && last_output.sizes() != input_.sizes()) group_by(last_output);
}

void TensorArgs::group_by(const Tensor& tensor) {
  if (tensor.dim() == static_cast<int64_t>(normalized_dims_)) return;  // the common case, without allocations
  weight.groups = tensor.numel() / cols;
  order_ = dims_by_group(input_, tensor, input_.dim() - static_cast<int64_t>(normalized_dims_));
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
}

// Returns a view with the rows ordered by group.
Tensor TensorArgs::by_group(const Tensor& rows) const {
  if (!is_permuted()) return rows;
  c10::DimVector order = order_;
  while (order.size() < static_cast<size_t>(rows.dim())) order.push_back(static_cast<int64_t>(order.size()));
  return rows.permute(order);
}

// Returns the number of trailing dimensions that form a row.
size_t TensorArgs::dims_of(TensorIndex index) const {
  return index == kSquareSum || index == kDot ? 0 : normalized_dims_;
}

void TensorArgs::add_input(TensorIndex index, const Tensor& tensor) {
  if (!tensor.defined() || index == kCos || index == kSin) return;  // rotate() adds these
  if (has_channels()) {
    if (index != kWeight && index != kBias) return add_channels(index, by_channels(tensor), Access::read);
    set(index, make_rows(tensor, tensor.dim()));
    if (index == kWeight) weight.data = (*this)[kWeight].data, weight.dtype = (*this)[kWeight].dtype;
  } else if (index == kWeight) {
    weight_has_all_rows_ ? add_modulation(kGate, tensor) : add_weight(tensor);
  } else if (index == kBias) {
    if (!has(kGradOutput)) add_modulation(kBias, tensor);  // a backward does not read it
  } else if (is_permuted()) {
    set(index, make_rows(by_group(tensor), dims_of(index), requirements_.max_dims));
  } else {
    set(index, make_rows(tensor, dims_of(index), requirements_.max_dims));
  }
}

// Returns the tensor as [samples, channels, positions]: a view if its strides allow one.
Tensor TensorArgs::by_channels(const Tensor& tensor) const {
  Tensor result = tensor.reshape({rows / channels.positions, cols, channels.positions});
  return result.stride(2) == 1 || !requirements_.contiguous_positions ? result : result.contiguous();
}

// Declares rows as float32, in which kernels compute them, as weights and sums are in that dtype's order of columns.
void TensorArgs::add_channels(TensorIndex index, Tensor tensor, Access access) {
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  channels.sample_strides[index] = tensor.stride(0) * bytes;
  channels.channel_strides[index] = tensor.stride(1) * bytes;
  const RowsArg arg = {data_of(tensor, access), DType::float32, kNoRows.layout};
  set(index, {c10::MaybeOwned<Tensor>::owned(std::move(tensor)), arg});
}

void TensorArgs::add_weight(const Tensor& tensor) {
  set(kWeight, make_rows(tensor, tensor.dim(), requirements_.max_dims));
  weight.data = (*this)[kWeight].data, weight.dtype = (*this)[kWeight].dtype;
  if (requirements_.by_groups || order_.empty()) return;
  Rows each = make_rows(rows_[kWeight]->tensor->expand(input_.sizes()), normalized_dims_, requirements_.max_dims);
  if (each.arg.data == weight.data) {
    rows_of_weight = each.arg.layout;
  } else {  // a copy, as the layout has too few dimensions
    weight.groups = rows, weight.data = each.arg.data;
    set(kWeight, std::move(each));
  }
}

// Adds a tensor that broadcasts over the rows of the input, with one row for each of them.
void TensorArgs::add_modulation(TensorIndex index, const Tensor& tensor) {
  Tensor expanded = by_group(tensor.expand(input_.sizes()));
  if (!may_be_beside(dtype_of(input_), dtype_of(expanded))) {
    expanded = expanded.to(input_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  set(index, make_rows(std::move(expanded), normalized_dims_, requirements_.max_dims));
}

void TensorArgs::add_output(TensorIndex index, const Tensor& target) {
  if (!target.defined()) return;
  const bool is_of_parameter = index == kGradWeight || index == kGradBias;
  if (has_channels() && !is_of_parameter) {
    targets_[index] = &target;
    Tensor view = by_channels(target);
    const bool is_copy = !view.is_alias_of(target);
    add_channels(index, is_copy ? at::empty_like(view, at::MemoryFormat::Contiguous) : std::move(view), Access::write);
    return;
  }
  const bool is_view = is_permuted() && !is_of_parameter;
  targets_[index] = is_view ? &permuted_.emplace_back(by_group(target)) : &target;
  set(index, make_target(*targets_[index], is_of_parameter ? target.dim() : dims_of(index), requirements_.max_dims));
}

void TensorArgs::set(TensorIndex index, Rows rows) {
  rows_[index].emplace(std::move(rows));
  tensors[index] = &rows_[index]->arg;
}

// Broadcasts the rows of cos and sin over those of the input, and makes their strides equal.
void TensorArgs::rotate(const Tensor& input, const Tensor& cos, const Tensor& sin, const Rope& rope) {
  c10::DimVector sizes(input.sizes());
  sizes.back() = cos.size(-1);
  const bool are_alike = cos.strides() == sin.strides();
  const auto over_rows = [&](const Tensor& table) {
    return by_group((are_alike ? table : table.contiguous()).expand(sizes));
  };
  set(kCos, make_rows(over_rows(cos), 1, requirements_.max_dims));
  set(kSin, make_rows(over_rows(sin), 1, requirements_.max_dims));
  const int64_t columns = sizes.back(), pairs = rope.rotary_dim.value_or(columns) / 2;
  rotation = {rope.interleaved, columns == pairs, rope.rotary_offset, pairs};
}

void TensorArgs::finish() const {
  for (int i = 0; i < kTensorCount; i++) {
    if (targets_[i] == nullptr) continue;
    const Tensor &written = *rows_[i]->tensor, &target = *targets_[i];
    if (!written.is_alias_of(target)) target.copy_(written.view(target.sizes()));
  }
}

}  // namespace normops
