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

Call::Call(const Tensor& input, const Norm& norm, int max_dims)
    : KernelArgs(), normalized_dims_(norm.dims()), max_dims_(max_dims) {
  cols = size = c10::multiply_integers(input.sizes().slice(input.dim() - norm.dims()));
  rows = input.numel() / cols;
  eps = resolve_eps(norm.eps, input.scalar_type());
  casting = norm.casting();
  weight.groups = 1;
  if (is_given(norm.weight)) {
    weight.offset = norm.weight_offset;
    weight.groups = norm.weight->numel() / cols;
    order_ = dims_by_group(input, *norm.weight, input.dim() - norm.dims());
    if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
  }
}

// Where the dimensions of rows are not in that order, a view in which they are.
Tensor Call::by_group(const Tensor& rows) const {
  if (order_.empty()) return rows;
  c10::DimVector order = order_;
  while (order.size() < static_cast<size_t>(rows.dim())) order.push_back(static_cast<int64_t>(order.size()));
  return rows.permute(order);
}

const Tensor& Call::add(TensorIndex index, const Tensor& given, Make make) {
  if (!given.defined() || index == kCos || index == kSin) return given;
  const bool is_whole = index == kWeight || index == kGradWeight, has_numbers = index == kSquareSum || index == kDot;
  const Tensor& tensor = order_.empty() || is_whole ? given : ordered_.emplace_back(by_group(given));
  set(index, make(tensor, is_whole ? tensor.dim() : has_numbers ? 0 : normalized_dims_, max_dims_));
  if (index == kWeight) weight.data = (*this)[index].data, weight.dtype = (*this)[index].dtype;
  return tensor;
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
