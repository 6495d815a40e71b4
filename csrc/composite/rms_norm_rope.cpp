#include "../rms_norm_rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "composite.h"
#include "kernels.h"

namespace normops {
namespace {

// The rotated columns, or their angles: the first and the second of each pair.
struct Pairs {
  Tensor first, second;
};

Pairs in_pairs(const Tensor& columns, bool interleaved) {
  const c10::SymInt count = columns.sym_size(-1), half = count / 2;
  if (!interleaved) return {columns.narrow_symint(-1, 0, half), columns.narrow_symint(-1, half, half)};
  return {columns.slice_symint(-1, 0, count, 2), columns.slice_symint(-1, 1, count, 2)};
}

// Applies turn(x, cos, sin), which returns the new Pairs, to the rotated columns.
template <class Turn>
Tensor rotate_columns(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope, const Turn& turn) {
  const c10::SymInt rotary_dim = rotary_columns(cos, rope), offset = rope.rotary_offset, end = offset + rotary_dim;
  const bool has_angle_of_pair = rope.rotary_dim.has_value() && cos.sym_size(-1) != rotary_dim;
  const auto angles = [&](const Tensor& table) {
    return has_angle_of_pair ? Pairs{table, table} : in_pairs(table, rope.interleaved);
  };
  const Tensor columns = rows.narrow_symint(-1, offset, rotary_dim);
  const Pairs y = turn(in_pairs(columns, rope.interleaved), angles(cos), angles(sin));
  const Tensor rotated = rope.interleaved ? at::stack({y.first, y.second}, -1).view_symint(columns.sym_sizes())
                                          : at::cat({y.first, y.second}, -1);
  return at::cat({rows.narrow_symint(-1, 0, offset), rotated, rows.narrow_symint(-1, end, rows.sym_size(-1) - end)},
                 -1);
}

}  // namespace

Tensor rotate(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope) {
  return rotate_columns(rows, cos, sin, rope, [](const Pairs& x, const Pairs& c, const Pairs& s) {
    return Pairs{x.first * c.first - x.second * s.first, x.second * c.second + x.first * s.second};
  });
}

Tensor rotate_back(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Rope& rope) {
  return rotate_columns(rows, cos, sin, rope, [](const Pairs& x, const Pairs& c, const Pairs& s) {
    return Pairs{x.first * c.first + x.second * s.second, x.second * c.second - x.first * s.first};
  });
}

Tensor composite(const RmsNormRope& arguments) {
  const auto& [input, cos, sin, norm, rope] = arguments;
  const at::ScalarType dtype = input.scalar_type();
  const Tensor normalized =
      round_to(normalize(to_compute_dtype(input, input), norm, dtype), dtype, norm.parsed_rounding().multiplied);
  return rotate(normalized, to_compute_dtype(cos, input), to_compute_dtype(sin, input), rope).to(dtype);
}

std::tuple<Tensor, Tensor> composite(const RmsNormRopeBackward& arguments) {
  const auto& [grad_output, input, cos, sin, norm, rope, output_mask] = arguments;
  const at::ScalarType dtype = input.scalar_type();
  const Tensor dy = rotate_back(to_compute_dtype(grad_output, input), to_compute_dtype(cos, input),
                                to_compute_dtype(sin, input), rope);
  auto [grad_input, grad_weight] = normalize_backward(round_to(dy, dtype, norm.parsed_rounding().multiplied),
                                                      to_compute_dtype(input, input), norm, dtype, output_mask);
  if (grad_input.defined()) grad_input = grad_input.to(dtype);
  return {grad_input, grad_weight};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) {
  register_all<Composite>(m, List<RmsNormRope, RmsNormRopeBackward>());
}

}  // namespace normops
