#pragma once
#include <ATen/core/Tensor.h>

namespace normops {

// Returns false for meta, fake and functional tensors, which only describe memory, possibly of symbolic size.
bool has_memory(const at::Tensor& tensor);

// The memory that two tensors share: none, the same elements in the same order, or some. For equal nested strides (all
// but unusual as_strided views) the result is exact, so interleaved slices of one buffer share none. For other strides,
// overlapping address ranges count as partial. Tensors without memory share none.
enum class Overlap { none, exact, partial };

Overlap overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace normops
