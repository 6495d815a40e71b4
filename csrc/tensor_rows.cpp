#include "tensor_rows.h"

#include <ATen/ops/empty_like.h>

#include <limits>

namespace normops {

double resolve_eps(std::optional<double> eps, at::ScalarType input_dtype) {
  return eps.value_or(input_dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                 : std::numeric_limits<float>::epsilon());
}

std::optional<DType> find_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat:
      return DType::float32;
    case at::kDouble:
      return DType::float64;
    default:
      return std::nullopt;
  }
}

DType dtype_of(const at::Tensor& tensor) {
  const auto dtype = find_dtype(tensor.scalar_type());
  TORCH_INTERNAL_ASSERT(dtype.has_value(), "not a dtype that passes the check: ", tensor.scalar_type());
  return *dtype;
}

void* data_of(const at::Tensor& tensor, Access access) {
  return access == Access::write ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
}

namespace {

Rows make_rows(c10::MaybeOwned<at::Tensor> lent, size_t normalized_dims, int max_dims) {
  const at::Tensor& tensor = *lent;
  const DType dtype = dtype_of(tensor);
  if (tensor.numel() == 0) return {std::move(lent), {nullptr, dtype, kNoRows.layout}};
  const int64_t leading = tensor.dim() - static_cast<int64_t>(normalized_dims);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const auto bytes = static_cast<int64_t>(tensor.element_size());

  bool rows_are_contiguous = true;
  int64_t cols = 1;
  for (int64_t d = tensor.dim() - 1; d >= leading; d--) {
    rows_are_contiguous &= strides[d] == cols || sizes[d] <= 1;
    cols *= sizes[d];
  }

  RowLayout layout;
  for (int64_t d = 0; d < leading; d++) {
    if (sizes[d] == 1) continue;
    const int last = layout.dims - 1;
    if (layout.dims > 0 && layout.strides[last] == strides[d] * sizes[d] * bytes) {
      layout.sizes[last] *= sizes[d];
      layout.strides[last] = strides[d] * bytes;
    } else if (layout.dims == max_dims) {
      return normops::make_rows(tensor.contiguous(), normalized_dims, max_dims);  // merges its rows into one dimension
    } else {
      layout.sizes[layout.dims] = sizes[d];
      layout.strides[layout.dims] = strides[d] * bytes;
      layout.dims++;
    }
  }
  if (rows_are_contiguous) {
    const RowsArg arg = {data_of(tensor, Access::read), dtype, layout};
    return {std::move(lent), arg};
  }

  at::Tensor once = tensor;
  for (int64_t d = 0; d < leading; d++) {
    if (strides[d] == 0 && sizes[d] > 1) once = once.narrow(d, 0, 1);
  }
  return normops::make_rows(once.contiguous().expand(sizes), normalized_dims, max_dims);
}

}  // namespace

Rows make_rows(const at::Tensor& tensor, size_t normalized_dims, int max_dims) {
  return make_rows(c10::MaybeOwned<at::Tensor>::borrowed(tensor), normalized_dims, max_dims);
}

Rows make_rows(at::Tensor&& tensor, size_t normalized_dims, int max_dims) {
  return make_rows(c10::MaybeOwned<at::Tensor>::owned(std::move(tensor)), normalized_dims, max_dims);
}

Rows make_target(const at::Tensor& target, size_t normalized_dims, int max_dims) {
  Rows rows = make_rows(target, normalized_dims, max_dims);
  if (!rows.tensor->is_same(target)) {
    rows = make_rows(at::empty_like(target, at::MemoryFormat::Contiguous), normalized_dims, max_dims);
  }
  rows.arg.data = data_of(*rows.tensor, Access::write);
  return rows;
}

}  // namespace normops
