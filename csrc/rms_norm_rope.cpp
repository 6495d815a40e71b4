#include "rms_norm_rope.h"

namespace normops {
namespace {

void check_angles(const char* op, const Tensor& cos, const Tensor& input) {
  const auto sizes = cos.sym_sizes(), of_input = input.sym_sizes();
  const auto message = [&] {
    return c10::str(op, ": expected cos to broadcast over the leading dimensions of input, whose shape is ", of_input,
                    ", but got the shape ", sizes);
  };
  TORCH_CHECK(!sizes.empty() && sizes.size() <= of_input.size(), message());
  const size_t more = of_input.size() - sizes.size();
  for (size_t d = 0; d + 1 < sizes.size(); d++) TORCH_CHECK(is_broadcast(sizes[d], of_input[more + d]), message());
}

}  // namespace

void check_rope(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin, const Norm& norm,
                const Rope& rope) {
  TORCH_CHECK(norm.dims() == 1, op, ": expected normalized_shape to be one dimension, along which rows are rotated, ",
              "but got ", norm.normalized_shape);
  check_wider_dtype(op, "cos", cos, input);
  check_angles(op, cos, input);
  const auto &cols = input.sym_sizes().back(), &columns = cos.sym_sizes().back();
  if (!rope.rotary_dim.has_value()) {
    // A table of half the width may be for half of the columns, or have one column for each pair.
    const bool is_half = (columns * 2).maybe_as_int() == cols.maybe_as_int();
    TORCH_SYM_CHECK(columns.sym_eq(cols), op, ": expected cos to have ", cols, " columns, those of input, but got ",
                    columns, ": pass rotary_dim=", columns, " to rotate ", columns, " columns",
                    is_half ? c10::str(", or rotary_dim=", cols,
                                       " or torch.cat((cos, cos), -1) if each column of cos is for a pair of columns")
                            : "");
  }
  const c10::SymInt rotary_dim = rotary_columns(cos, rope);
  TORCH_SYM_CHECK(rotary_dim.sym_ge(0), op, ": expected rotary_dim to be at least 0, but got ", rotary_dim);
  TORCH_SYM_CHECK((rotary_dim % 2).sym_eq(0), op, ": expected rotary_dim",
                  rope.rotary_dim.has_value() ? "" : ", the columns of cos,", " to be even, but got ", rotary_dim);
  TORCH_SYM_CHECK(columns.sym_eq(rotary_dim).sym_or(columns.sym_eq(rotary_dim / 2)), op, ": expected cos to have ",
                  rotary_dim, " columns, the rotary_dim, or half as many, but got ", columns);
  TORCH_CHECK(rope.rotary_offset >= 0, op, ": expected rotary_offset to be at least 0, but got ", rope.rotary_offset);
  TORCH_SYM_CHECK(rotary_dim.sym_le(cols - rope.rotary_offset), op, ": expected the rotated columns, ", rotary_dim,
                  " from rotary_offset ", rope.rotary_offset, " on, to be among those of input, but it has ", cols);
  check_like(op, "sin", sin, {"cos", &cos});
}

}  // namespace normops
