// Tensors as kernels see them, of arguments that passed the operator's check.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <optional>

#include "kernel_args.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// eps, or by default the machine epsilon of the compute type, as in torch.nn.functional.rms_norm.
double resolve_eps(std::optional<double> eps, at::ScalarType input_dtype);

// The element type, if it is one of normops'.
std::optional<DType> find_dtype(at::ScalarType dtype);
DType dtype_of(const at::Tensor& tensor);

// Rows as a kernel reads or writes them. `tensor` holds the memory: it is the given tensor itself, lent, unless its
// normalized dimensions are not contiguous; then it is a copy, in which an expanded batch is still stored once.
struct Rows {
  c10::MaybeOwned<at::Tensor> tensor;
  RowsArg arg;
};

// The layout has at most `max_dims` dimensions; a tensor that needs more is copied, too.
Rows make_rows(const at::Tensor& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);
Rows make_rows(at::Tensor&& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

// The same to write to. What is written to a copy has still to be copied to the target.
Rows make_target(const at::Tensor& target, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

}  // namespace normops
#pragma GCC visibility pop
