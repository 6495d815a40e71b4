#include "../add_rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>

#include "composite.h"
#include "kernels.h"

namespace normops {

std::tuple<Tensor, Tensor> composite(const AddRmsNorm& arguments) {
  const auto& [input, residual, norm, alpha] = arguments;
  const Tensor x = to_compute_dtype(input, input), r = to_compute_dtype(residual, input);
  const Tensor sum =
      norm.parsed_rounding().multiplied ? round_to(x * alpha, input.scalar_type(), true) + r : at::add(r, x, alpha);
  const Tensor residual_out = sum.to(residual.scalar_type());
  const Tensor output = normalize(to_compute_dtype(residual_out, input), norm, input.scalar_type());
  return {output.to(input.scalar_type()), residual_out};
}

TORCH_LIBRARY_IMPL(normops, CompositeExplicitAutograd, m) { register_all<Composite>(m, List<AddRmsNorm>()); }

}  // namespace normops
