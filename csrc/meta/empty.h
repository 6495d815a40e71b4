#pragma once
#include <ATen/ops/empty.h>

namespace normops {

inline at::Tensor empty_like_contiguous(const at::Tensor& tensor) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options());
}

}  // namespace normops
