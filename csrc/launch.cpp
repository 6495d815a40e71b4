#include "launch.h"

#include <algorithm>
#include <numeric>

namespace normops {
namespace {

// The dimensions of the rows, those first over which the weight broadcasts: so row r is of group r % groups.
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
  casting = norm.casting();
  weight.groups = 1;
  if (!is_given(norm.weight)) return;
  weight.offset = norm.weight_offset == 0 ? -0.0 : norm.weight_offset;
  group_by(*norm.weight);
}

// Leaves a weight that is as large as the input where it is, and makes groups of a bias whose gradient is wanted.
void Call::modulate(const Norm& norm, const Tensor& last_output) {
  weight_has_all_rows_ = !by_groups_ && has_all_rows(norm, input_);
  if (weight_has_all_rows_) weight.groups = 1, order_.clear(), gating.norm_before_gate = true;
  if (last_output.defined() && !is_given(norm.weight) && last_output.sizes() != input_.sizes()) group_by(last_output);
}

void Call::group_by(const Tensor& tensor) {
  if (tensor.dim() == static_cast<int64_t>(normalized_dims_)) return;  // the most common, without allocations
  weight.groups = tensor.numel() / cols;
  order_ = dims_by_group(input_, tensor, input_.dim() - static_cast<int64_t>(normalized_dims_));
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
}

// Where the dimensions of rows are not in that order, a view in which they are.
Tensor Call::by_group(const Tensor& rows) const {
  if (!by_groups_ || order_.empty()) return rows;
  c10::DimVector order = order_;
  while (order.size() < static_cast<size_t>(rows.dim())) order.push_back(static_cast<int64_t>(order.size()));
  return rows.permute(order);
}

void Call::add(TensorIndex index, const Tensor& given, Make make) {
  if (!given.defined() || index == kCos || index == kSin || (index == kBias && has(kGradOutput))) return;
  const Tensor* tensor = &given;
  const auto change = [&](Tensor changed) { tensor = &changed_.emplace_back(std::move(changed)); };
  if (index == kWeight && weight_has_all_rows_) index = kGate;
  const bool is_whole = index == kWeight || index == kGradWeight || index == kGradBias,
             is_modulation = index == kBias || (index == kGate && weight_has_all_rows_);
  if (is_modulation) change(tensor->expand(input_.sizes()));
  if (by_groups_ && !order_.empty() && !is_whole) change(by_group(*tensor));
  const size_t dims = is_whole ? tensor->dim() : index == kSquareSum || index == kDot ? 0 : normalized_dims_;
  if (make == make_target) targets_[index] = tensor;
  if (is_modulation && !may_be_beside(dtype_of(input_), dtype_of(*tensor))) {
    change(tensor->to(input_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  }
  set(index, make(*tensor, dims, max_dims_));
  if (index != kWeight) return;
  weight.data = (*this)[index].data, weight.dtype = (*this)[index].dtype;
  if (by_groups_ || order_.empty()) return;
  Rows each = make_rows(rows_[kWeight]->tensor->expand(input_.sizes()), normalized_dims_, max_dims_);
  if (each.arg.data == weight.data) {
    rows_of_weight = each.arg.layout;
  } else {  // a copy, as the layout has too few dimensions
    weight.groups = rows, weight.data = each.arg.data;
    set(kWeight, std::move(each));
  }
}

void Call::set(TensorIndex index, Rows rows) {
  rows_[index].emplace(std::move(rows));
  tensors[index] = &rows_[index]->arg;
}

// The rows of cos and sin broadcast over those of the input, and lie alike.
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
