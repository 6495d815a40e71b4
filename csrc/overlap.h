#pragma once
#include <ATen/core/Tensor.h>

namespace normops {

// False for the tensors of tracing (meta, fake, functional), which only describe memory, perhaps of symbolic size.
bool has_memory(const at::Tensor& tensor);

// Whether two tensors share memory (those without any do not): not at all, element for element, or otherwise. For equal
// strides that nest (all but exotic as_strided views) the answer is exact, which tells interleaved slices of one buffer
// from overlapping ones; else tensors whose address ranges meet count as partial.
enum class Overlap { none, exact, partial };

Overlap overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace normops
