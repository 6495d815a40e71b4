// add_rms_norm on CUDA tensors.
#include "../add_rms_norm_backend.h"

#include "add_rms_norm_launch.h"
#include "binding.h"

namespace normops::cuda {
namespace {

void run_add_rms_norm(const Tensor& input, const Tensor& residual, size_t normalized_dims, const OptionalTensor& weight,
                      std::optional<double> eps, double weight_offset, const Tensor& output,
                      const Tensor& residual_out) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims), r = make_rows(residual, normalized_dims);
  const Target y(output, normalized_dims), h(residual_out, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  const AddRmsNormArgs args = {forward_args(problem, x, w, weight_offset, y),
                               dtype_of(residual),
                               r.tensor->const_data_ptr(),
                               r.layout,
                               h.data(),
                               h.layout()};
  launch_add_rms_norm(args, current_device(), current_stream(input));
  y.finish();
  h.finish();
}

struct Backend : CudaBackend {
  static constexpr auto launch = run_add_rms_norm;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { AddRmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cuda
