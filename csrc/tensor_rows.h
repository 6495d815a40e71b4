// Converts tensors that passed the operator's check to the form that kernels take.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <optional>

#include "kernel_args.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// Returns eps, or by default the machine epsilon of the compute type, as in torch.nn.functional.rms_norm.
double resolve_eps(std::optional<double> eps, at::ScalarType input_dtype);

// Returns the element type; nullopt if normops does not support it.
std::optional<DType> find_dtype(at::ScalarType dtype);
DType dtype_of(const at::Tensor& tensor);

// Returns the address of the first element, for a kernel that only reads or also writes. It is the only source of
// pointers to a call's tensors, whose storages check_memory() has checked.
enum class Access { read, write };
void* data_of(const at::Tensor& tensor, Access access);

// Rows as a kernel reads or writes them. `tensor` is the given tensor, borrowed, or a copy if its normalized dimensions
// are not contiguous. The copy stores an expanded batch only once.
struct Rows {
  c10::MaybeOwned<at::Tensor> tensor;
  RowsArg arg;
};

// Returns rows whose layout has at most `max_dims` dimensions. A tensor that needs more is copied.
Rows make_rows(const at::Tensor& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);
Rows make_rows(at::Tensor&& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

// The same for an output. If `tensor` is not the target itself, the caller must copy it to the target.
Rows make_target(const at::Tensor& target, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

}  // namespace normops
#pragma GCC visibility pop
