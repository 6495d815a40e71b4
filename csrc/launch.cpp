#include "launch.h"

namespace normops {

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
  }
}

void Call::add(TensorIndex index, const Tensor& tensor, Make make) {
  if (!tensor.defined() || index == kCos || index == kSin) return;
  const bool is_whole = index == kWeight || index == kGradWeight, has_numbers = index == kSquareSum || index == kDot;
  set(index, make(tensor, is_whole ? tensor.dim() : has_numbers ? 0 : normalized_dims_, max_dims_));
  if (index == kWeight) weight.data = (*this)[index].data, weight.dtype = (*this)[index].dtype;
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
  const auto over_rows = [&](const Tensor& table) { return (are_alike ? table : table.contiguous()).expand(sizes); };
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
