// Building blocks of the operators' checks. Each throws c10::Error (a RuntimeError in Python) with a message that names
// the argument, the expected and the actual value. `op` is the operator's name, `name` the argument's. All except the
// checks of overlap support symbolic sizes and fake tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace normops {

using at::Tensor;
inline const Tensor kUndefined;  // not a function's static variable: those lock when they are first used

}  // namespace normops

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

using OptionalTensor = std::optional<Tensor>;  // a schema's `Tensor?`

inline bool is_given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Returns a reference, as counting references to a tensor costs a call as much as checking it.
inline const Tensor& value_or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : kUndefined;
}
const Tensor& value_or_undefined(OptionalTensor&&) = delete;

// Rejects an undefined tensor, which None becomes. The dispatcher has no message for it.
void check_given(const char* op, const char* name, const Tensor& tensor);

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

struct Norm;  // operator.h
class OutputSpec;

// Checks input, and that normalized_shape is its last dimensions.
void check_input(const char* op, const Tensor& input, c10::SymIntArrayRef normalized_shape);

// Checks input and the arguments that all norms share.
void check_norm(const char* op, const Tensor& input, const Norm& norm);

// Checks a tensor of any dtype and of shape [..., *normalized_shape]. Its leading dimensions broadcast to those of the
// input, which has the sizes `of_input`.
void check_broadcast(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef of_input,
                     c10::SymIntArrayRef normalized_shape);

// Returns whether a size is 1 or `expected`. Symbolic sizes record a guard or a runtime assertion.
bool is_broadcast(const c10::SymInt& size, const c10::SymInt& expected);

// Checks that a tensor has the dtype and the shape of input.
void check_like_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// The same, but the tensor may have 16 bits if input is float32.
void check_narrower_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// Like check_like_input, but the tensor may be float32 if input has 16 bits.
void check_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// The same for a tensor of any shape.
void check_wider_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// Like check_like_input, but either of the two tensors may be float32 if the other has 16 bits.
void check_narrower_or_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// Checks a tensor with one number for each row, in the compute dtype of input.
void check_numbers_of_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& input,
                           size_t normalized_dims);

// Checks the number of elements of a whole row, of which normalized_shape may be a part.
void check_row_size(const char* op, const c10::SymInt& size, c10::SymIntArrayRef normalized_shape);

struct Named {
  const char* name;
  const Tensor* tensor;  // may be undefined
};

// Checks that a tensor has the dtype and the shape of another argument.
void check_like(const char* op, const char* name, const Tensor& tensor, const Named& other);

// Checks a tensor to write to: it has the device, dtype and shape of `result`, and is not expanded.
void check_out(const char* op, const Named& out, const OutputSpec& result);

// Checks that the storage of a tensor with memory holds all elements that its sizes, strides and offset reach.
void check_memory(const char* op, const char* name, const Tensor& tensor);

// Checks that `out` either aliases an input exactly or shares no memory with it.
void check_overlaps(const char* op, const Named& out, c10::ArrayRef<Named> inputs);

// Checks that `out` shares no memory with another argument.
void check_disjoint(const char* op, const Named& out, const Named& other_out);

}  // namespace normops
#pragma GCC visibility pop
