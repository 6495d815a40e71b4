// How operators trace that write into given tensors: as the functional operator followed by a copy into these, so that
// a compiled graph holds the same operators whichever overload the program called.
#pragma once
#include <ATen/FunctionalTensorWrapper.h>

#include "../check.h"

namespace normops {

inline Tensor unwrap(const Tensor& tensor) {
  if (!tensor.defined() || !at::functionalization::impl::isFunctionalTensor(tensor)) return tensor;
  at::functionalization::impl::sync(tensor);
  return at::functionalization::impl::from_functional_tensor(tensor);
}

inline OptionalTensor unwrap(const OptionalTensor& tensor) {
  return is_given(tensor) ? OptionalTensor(unwrap(*tensor)) : std::nullopt;
}

inline void replace(const Tensor& target, const Tensor& value) {
  at::functionalization::impl::replace_(target, value);
  at::functionalization::impl::commit_update(target);
  at::functionalization::impl::sync(target);
}

inline void check_functional(const char* op, const char* name, const Tensor& target) {
  TORCH_CHECK(at::functionalization::impl::isFunctionalTensor(target), op, ": expected ", name,
              " to be a tensor that is traced like the other arguments, but got one from outside the traced function");
}

}  // namespace normops
