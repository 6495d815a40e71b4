// add_rms_norm on CPU tensors.
#include "../add_rms_norm_backend.h"

#include "add_rms_norm_kernel.h"
#include "launch.h"

namespace normops::cpu {
namespace {

void launch_add_rms_norm(const Tensor& input, const Tensor& residual, size_t normalized_dims,
                         const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                         const Tensor& output, const Tensor& residual_out) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims), r = make_rows(residual, normalized_dims);
  const Target y(output, normalized_dims), h(residual_out, normalized_dims);
  const Scale scale(weight, weight_offset, dtype_of(residual), problem);
  const AddRmsNormArgs args = {
      forward_args(problem, x, y), dtype_of(residual), r.tensor->const_data_ptr(), r.layout, h.data(), h.layout()};
  run_forward(add_rms_norm_kernels(), args, scale, problem.rows);
  y.finish();
  h.finish();
}

struct Backend : CpuBackend {
  static constexpr auto launch = launch_add_rms_norm;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { AddRmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cpu
