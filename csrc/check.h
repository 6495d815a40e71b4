// What the operators' checks are made of. Every check throws c10::Error (a RuntimeError in Python) with a message that
// names the argument, what was expected and what came; `op` is the operator's name, `name` the argument's. All but
// those on overlap hold for symbolic sizes and fake tensors too.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;  // a schema's `Tensor?`

inline bool is_given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Tensors are lent where they can be: counting a reference to one costs a call as much as checking it.
inline const Tensor& value_or_undefined(const OptionalTensor& tensor) {
  static const Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}
const Tensor& value_or_undefined(OptionalTensor&&) = delete;

// Python's None is an undefined tensor, for which the dispatcher has no message.
void check_given(const char* op, const char* name, const Tensor& tensor);

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

struct Norm;  // operator.h
class OutputSpec;

// input, and which of its dimensions are normalized.
void check_input(const char* op, const Tensor& input, c10::SymIntArrayRef normalized_shape);

// input and what all norms have.
void check_norm(const char* op, const Tensor& input, const Norm& norm);

// A tensor of any dtype whose last dimensions are the normalized ones; those before them broadcast to input's, which
// has these sizes.
void check_broadcast(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef of_input,
                     c10::SymIntArrayRef normalized_shape);

// Whether a size is 1 or `expected`, which a symbol may have to say.
bool is_broadcast(const c10::SymInt& size, const c10::SymInt& expected);

// A tensor that has to look like `input`.
void check_like_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// The same, but with float32 as input's dtype it may have 16 bits.
void check_narrower_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// A tensor that has to look like `input`, but may be float32 if input has 16 bits.
void check_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// The same of a tensor that may have any shape.
void check_wider_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// A tensor that has to look like `input`, but one of the two may be float32 beside 16 bits of the other.
void check_narrower_or_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input);

// One number for each row of input, in the dtype that it is computed in.
void check_numbers_of_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& input,
                           size_t normalized_dims);

// How many elements a whole row has, of which normalized_shape may be a part.
void check_row_size(const char* op, const c10::SymInt& size, c10::SymIntArrayRef normalized_shape);

struct Named {
  const char* name;
  const Tensor* tensor;  // may be undefined
};

// A tensor that has to have the dtype and the shape of another argument.
void check_like(const char* op, const char* name, const Tensor& tensor, const Named& other);

// What is written to: it must look like `result`, with memory for each of its elements.
void check_out(const char* op, const Named& out, const OutputSpec& result);

// It may share memory with an input only by being that input.
void check_overlaps(const char* op, const Named& out, c10::ArrayRef<Named> inputs);

// Two outputs of one call.
void check_disjoint(const char* op, const Named& out, const Named& other_out);

}  // namespace normops
#pragma GCC visibility pop
