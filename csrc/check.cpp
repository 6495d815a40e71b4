#include "check.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>

#include "channel_rms_norm.h"
#include "gated_rms_norm.h"
#include "overlap.h"
#include "tensor_rows.h"

namespace normops {
namespace {

// getDtypeNames returns strings in torch 2.11, and string views in later versions.
std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }
std::string dtype_name(const Tensor& tensor) { return dtype_name(tensor.scalar_type()); }

void check_tensor(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": expected ", name,
              " to be a dense (strided) tensor, but got layout ", tensor.layout());
  TORCH_CHECK(find_dtype(tensor.scalar_type()).has_value(), op, ": expected ", name,
              " to be float16, bfloat16, float32 or float64, but got ", dtype_name(tensor));
}

template <class Message>
void check_equal(c10::SymIntArrayRef sizes, c10::SymIntArrayRef expected, const Message& message) {
  TORCH_CHECK(sizes.size() == expected.size(), message());
  for (size_t d = 0; d < sizes.size(); d++) {
    const auto size = sizes[d].maybe_as_int(), expected_size = expected[d].maybe_as_int();
    if (size.has_value() && expected_size.has_value()) {  // faster than a symbolic comparison
      TORCH_CHECK(*size == *expected_size, message());
    } else {
      TORCH_SYM_CHECK(sizes[d].sym_eq(expected[d]), message());
    }
  }
}

void check_shape(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef shape, const char* whose) {
  check_equal(tensor.sym_sizes(), shape, [&] {
    return c10::str(op, ": expected ", name, " to have shape ", shape, ", ", whose, ", but got ", tensor.sym_sizes());
  });
}

// `or_else` names other accepted dtypes in the message. `is_else` is true if the tensor has one of them.
void check_dtype(const char* op, const char* name, const Tensor& tensor, const Named& other, const char* or_else = "",
                 bool is_else = false) {
  check_tensor(op, name, tensor);
  TORCH_CHECK(is_else || tensor.scalar_type() == other.tensor->scalar_type(), op, ": expected ", name, " to be ",
              dtype_name(*other.tensor), ", the dtype of ", other.name, or_else, ", but got ", dtype_name(tensor));
}

void check_like_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input, const char* or_else,
                      bool is_else) {
  check_dtype(op, name, tensor, {"input", &input}, or_else, is_else);
  check_shape(op, name, tensor, input.sym_sizes(), "the shape of input");
}

bool is_16_bits(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace

void check_given(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": expected ", name, " to be a tensor, but got None");
}

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), op, ": expected ", name, " to be on ", input.device(),
              ", the device of input, but got ", tensor.device());
}

void check_input(const char* op, const Tensor& input, c10::SymIntArrayRef normalized_shape) {
  check_tensor(op, "input", input);
  const int64_t leading = input.dim() - static_cast<int64_t>(normalized_shape.size());
  TORCH_CHECK(!normalized_shape.empty(), op, ": expected normalized_shape to have at least one dimension, but got []");
  const auto message = [&] {
    return c10::str(op, ": expected normalized_shape to be the last dimensions of input, whose shape is ",
                    input.sym_sizes(), ", but got ", normalized_shape);
  };
  TORCH_CHECK(leading >= 0, message());
  check_equal(input.sym_sizes().slice(leading), normalized_shape, message);
}

bool is_broadcast(const c10::SymInt& size, const c10::SymInt& expected) {
  const auto known = size.maybe_as_int(), known_expected = expected.maybe_as_int();
  if (known.has_value() && known_expected.has_value()) return *known == 1 || *known == *known_expected;
  return size.sym_eq(1).sym_or(size.sym_eq(expected)).expect_true(__FILE__, __LINE__);
}

void check_broadcast(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef of_input,
                     c10::SymIntArrayRef normalized_shape) {
  check_tensor(op, name, tensor);
  const auto sizes = tensor.sym_sizes();
  const size_t leading = of_input.size() - normalized_shape.size();
  const auto message = [&] {
    const auto more = c10::str(", or before it dimensions that broadcast to those of input, whose shape is ", of_input);
    return c10::str(op, ": expected ", name, " to have shape ", normalized_shape, ", the normalized_shape",
                    leading > 0 ? more : "", ", but got ", sizes);
  };
  TORCH_CHECK(normalized_shape.size() <= sizes.size() && sizes.size() <= of_input.size(), message());
  const size_t before = sizes.size() - normalized_shape.size();
  for (size_t d = 0; d < before; d++) TORCH_CHECK(is_broadcast(sizes[d], of_input[leading - before + d]), message());
  check_equal(sizes.slice(before), normalized_shape, message);
}

std::optional<Rounding> parse_rounding(std::string_view rounding) {
  if (rounding == kRoundOnce) return Rounding{.normalized = false, .multiplied = false};
  if (rounding == "llama") return Rounding{.normalized = true, .multiplied = true};
  return std::nullopt;
}

std::optional<Activation> find_activation(std::string_view name) {
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "sigmoid") return Activation::sigmoid;
  return std::nullopt;
}

Activation parse_activation(const char* op, std::string_view name) {
  const auto activation = find_activation(name);
  TORCH_CHECK(activation.has_value(), op, ": expected activation to be \"silu\", \"swish\" or \"sigmoid\", but got \"",
              name, "\"");
  return *activation;
}

namespace {

// Checks weight, eps and rounding of a norm. `sizes` are the input's, with the normalized dimensions last.
void check_parameters(const char* op, c10::SymIntArrayRef sizes, const Norm& norm) {
  const auto& [normalized_shape, weight, eps, weight_offset, rounding] = norm;
  if (is_given(weight)) check_broadcast(op, "weight", *weight, sizes, normalized_shape);
  TORCH_CHECK(!eps.has_value() || !std::isnan(*eps), op, ": expected eps to be a number, but got nan");
  TORCH_CHECK(parse_rounding(rounding).has_value(), op, ": expected rounding to be \"once\" or \"llama\", but got \"",
              rounding, "\"");
}

}  // namespace

void check_norm(const char* op, const Tensor& input, const Norm& norm) {
  check_input(op, input, norm.normalized_shape);
  check_parameters(op, input.sym_sizes(), norm);
}

void check_channels(const char* op, const Tensor& input, const Norm& norm, const OptionalTensor& bias, int64_t dim,
                    std::string_view activation) {
  check_tensor(op, "input", input);
  TORCH_CHECK(-input.dim() <= dim && dim < 0, op, ": expected dim to be one of the ", input.dim(),
              " dimensions of input, counted from the end as -1, but got ", dim);
  c10::SymDimVector sizes(input.sym_sizes());
  const auto channels = sizes.end() + dim;
  std::rotate(channels, channels + 1, sizes.end());
  check_equal(norm.normalized_shape, c10::SymIntArrayRef(sizes).slice(sizes.size() - 1), [&] {
    return c10::str(op, ": expected normalized_shape to be [", sizes.back(), "], the size of dimension ", dim,
                    " of input, but got ", norm.normalized_shape);
  });
  check_parameters(op, sizes, norm);
  if (is_given(bias)) check_broadcast(op, "bias", *bias, sizes, norm.normalized_shape);
  TORCH_CHECK(activation == kNoActivation || find_activation(activation).has_value(), op,
              ": expected activation to be \"identity\", \"silu\", \"swish\" or \"sigmoid\", but got \"", activation,
              "\"");
}

void check_like_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  check_like_input(op, name, tensor, input, "", false);
}

void check_narrower_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  const bool may_differ = input.scalar_type() == at::kFloat;
  check_like_input(op, name, tensor, input, may_differ ? ", or float16 or bfloat16" : "",
                   may_differ && is_16_bits(tensor));
}

void check_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  check_wider_dtype(op, name, tensor, input);
  check_shape(op, name, tensor, input.sym_sizes(), "the shape of input");
}

void check_wider_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  const bool may_differ = is_16_bits(input);
  check_dtype(op, name, tensor, {"input", &input}, may_differ ? ", or float32" : "",
              may_differ && tensor.scalar_type() == at::kFloat);
}

void check_like(const char* op, const char* name, const Tensor& tensor, const Named& other) {
  check_dtype(op, name, tensor, other);
  check_shape(op, name, tensor, other.tensor->sym_sizes(), c10::str("the shape of ", other.name).c_str());
}

void check_narrower_or_wider_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  (is_16_bits(input) ? check_wider_input : check_narrower_input)(op, name, tensor, input);
}

void check_numbers_of_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& input,
                           size_t normalized_dims) {
  const auto rows = OutputSpec::numbers_of_rows(input, normalized_dims);
  check_tensor(op, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == rows.scalar_type(), op, ": expected ", name, " to be ",
              dtype_name(rows.scalar_type()), ", in which ", dtype_name(input), " is computed, but got ",
              dtype_name(tensor));
  check_shape(op, name, tensor, rows.sym_sizes(), "a number for each row of input");
}

void check_row_size(const char* op, const c10::SymInt& size, c10::SymIntArrayRef normalized_shape) {
  const c10::SymInt cols = c10::multiply_integers(normalized_shape);
  TORCH_SYM_CHECK(size.sym_ge(cols), op, ": expected row_size to be that of a whole row, at least the ", cols,
                  " elements of normalized_shape, but got ", size);
}

void check_out(const char* op, const Named& out, const OutputSpec& result) {
  const Tensor& tensor = *out.tensor;
  check_given(op, out.name, tensor);
  check_device(op, out.name, tensor, result.argument());
  check_tensor(op, out.name, tensor);
  TORCH_CHECK(tensor.scalar_type() == result.scalar_type(), op, ": expected ", out.name, " to be ",
              dtype_name(result.scalar_type()), ", but got ", dtype_name(tensor));
  check_shape(op, out.name, tensor, result.sym_sizes(), "the shape of the result");
  if (!has_memory(tensor)) return;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t d = 0; d < sizes.size(); d++) {
    TORCH_CHECK(strides[d] != 0 || sizes[d] <= 1, op, ": expected ", out.name,
                " to have no expanded dimension, but got strides ", strides);
  }
}

void check_memory(const char* op, const char* name, const Tensor& tensor) {
  if (!has_memory(tensor) || tensor.numel() == 0) return;
  const size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(bytes <= tensor.storage().nbytes(), op, ": expected the storage of ", name, " to have at least ", bytes,
              " bytes, which its sizes, strides and offset reach, but got ", tensor.storage().nbytes(),
              tensor.storage().nbytes() == 0 ? ": it was freed" : "");
}

void check_overlaps(const char* op, const Named& out, c10::ArrayRef<Named> inputs) {
  for (const Named& input : inputs) {
    TORCH_CHECK(overlap(*out.tensor, *input.tensor) != Overlap::partial, op, ": expected ", out.name, " to be exactly ",
                input.name, " or to share no memory with it, but got a partial overlap");
  }
}

void check_disjoint(const char* op, const Named& out, const Named& other_out) {
  TORCH_CHECK(overlap(*out.tensor, *other_out.tensor) == Overlap::none, op, ": expected ", out.name, " and ",
              other_out.name, " to share no memory, but got an overlap");
}

}  // namespace normops
