#include "kernel_call.h"

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

Call::Call(const Tensor& input, const Norm& norm, int max_dims, bool by_groups)
    : KernelArgs(), input_(input), normalized_dims_(norm.dims()), max_dims_(max_dims), by_groups_(by_groups) {
  cols = size = c10::multiply_integers(input.sizes().slice(input.dim() - norm.dims()));
  rows = input.numel() / cols;
  eps = resolve_eps(norm.eps, input.scalar_type());
  rounding = norm.parsed_rounding();
  weight.groups = 1;
  if (!is_given(norm.weight)) return;
  weight.offset = norm.weight_offset == 0 ? -0.0 : norm.weight_offset;
  group_by(*norm.weight);
}

// Passes a full-size weight as a gate. Without a weight, groups rows by the bias if its gradient is wanted.
void Call::modulate(const Norm& norm, const Tensor& last_output) {
  weight_has_all_rows_ = !by_groups_ && has_all_rows(norm, input_);
  if (weight_has_all_rows_) weight.groups = 1, order_.clear(), gating.norm_before_gate = true;
  if (last_output.defined() && !is_given(norm.weight) && last_output.sizes() != input_.sizes()) group_by(last_output);
}

void Call::group_by(const Tensor& tensor) {
  if (tensor.dim() == static_cast<int64_t>(normalized_dims_)) return;  // the common case, without allocations
  weight.groups = tensor.numel() / cols;
  order_ = dims_by_group(input_, tensor, input_.dim() - static_cast<int64_t>(normalized_dims_));
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
}

// Returns a view with the rows ordered by group.
Tensor Call::by_group(const Tensor& rows) const {
  if (!is_permuted()) return rows;
  c10::DimVector order = order_;
  while (order.size() < static_cast<size_t>(rows.dim())) order.push_back(static_cast<int64_t>(order.size()));
  return rows.permute(order);
}

// Returns the number of trailing dimensions that form a row.
size_t Call::dims_of(TensorIndex index) const { return index == kSquareSum || index == kDot ? 0 : normalized_dims_; }

void Call::add_input(TensorIndex index, const Tensor& tensor) {
  if (!tensor.defined() || index == kCos || index == kSin) return;  // rotate() adds these
  if (index == kWeight) {
    weight_has_all_rows_ ? add_modulation(kGate, tensor) : add_weight(tensor);
  } else if (index == kBias) {
    if (!has(kGradOutput)) add_modulation(kBias, tensor);  // a backward does not read it
  } else if (is_permuted()) {
    set(index, make_rows(by_group(tensor), dims_of(index), max_dims_));
  } else {
    set(index, make_rows(tensor, dims_of(index), max_dims_));
  }
}

void Call::add_weight(const Tensor& tensor) {
  set(kWeight, make_rows(tensor, tensor.dim(), max_dims_));
  weight.data = (*this)[kWeight].data, weight.dtype = (*this)[kWeight].dtype;
  if (by_groups_ || order_.empty()) return;
  Rows each = make_rows(rows_[kWeight]->tensor->expand(input_.sizes()), normalized_dims_, max_dims_);
  if (each.arg.data == weight.data) {
    rows_of_weight = each.arg.layout;
  } else {  // a copy, as the layout has too few dimensions
    weight.groups = rows, weight.data = each.arg.data;
    set(kWeight, std::move(each));
  }
}

// Adds a tensor that broadcasts over the rows of the input, with one row for each of them.
void Call::add_modulation(TensorIndex index, const Tensor& tensor) {
  Tensor expanded = by_group(tensor.expand(input_.sizes()));
  if (!may_be_beside(dtype_of(input_), dtype_of(expanded))) {
    expanded = expanded.to(input_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  set(index, make_rows(std::move(expanded), normalized_dims_, max_dims_));
}

void Call::add_output(TensorIndex index, const Tensor& target) {
  if (!target.defined()) return;
  const bool is_of_parameter = index == kGradWeight || index == kGradBias;
  const bool is_view = is_permuted() && !is_of_parameter;
  targets_[index] = is_view ? &permuted_.emplace_back(by_group(target)) : &target;
  set(index, make_target(*targets_[index], is_of_parameter ? target.dim() : dims_of(index), max_dims_));
}

void Call::set(TensorIndex index, Rows rows) {
  rows_[index].emplace(std::move(rows));
  tensors[index] = &rows_[index]->arg;
}

// Broadcasts the rows of cos and sin over those of the input, and makes their strides equal.
void Call::rotate(const Tensor& input, const Tensor& cos, const Tensor& sin, const Rope& rope) {
  c10::DimVector sizes(input.sizes());
  sizes.back() = cos.size(-1);
  const bool are_alike = cos.strides() == sin.strides();
  const auto over_rows = [&](const Tensor& table) {
    return by_group((are_alike ? table : table.contiguous()).expand(sizes));
  };
  set(kCos, make_rows(over_rows(cos), 1, max_dims_));
  set(kSin, make_rows(over_rows(sin), 1, max_dims_));
  const int64_t columns = sizes.back(), pairs = rope.rotary_dim.value_or(columns) / 2;
  rotation = {rope.interleaved, columns == pairs, rope.rotary_offset, pairs};
}

void Call::finish() const {
  for (int i = 0; i < kTensorCount; i++) {
    if (tensors[i] != nullptr && targets_[i] != nullptr && !rows_[i]->tensor->is_same(*targets_[i])) {
      targets_[i]->copy_(*rows_[i]->tensor);
    }
  }
}

}  // namespace normops
