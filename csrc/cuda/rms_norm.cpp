// rms_norm and rms_norm_backward on CUDA tensors: lays the problem out for the kernels and launches them on the current
// stream.
#include "../rms_norm_backend.h"

#include "binding.h"

namespace normops::cuda {
namespace {

void run_rms_norm(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight, std::optional<double> eps,
                  double weight_offset, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims);
  const Target y(output, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  launch_rms_norm(forward_args(problem, x, w, weight_offset, y), current_device(), current_stream(input));
  y.finish();
}

// grad_input and grad_weight may be undefined: then they are not wanted.
void run_rms_norm_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                           const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                           const OptionalTensor& grad_residual, const Tensor& grad_input, const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Device device = current_device();
  const Stream stream = current_stream(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  RmsNormBackwardArgs args = backward_args(problem, dy, x, w, weight_offset);
  Rows residual;
  if (is_given(grad_residual)) {
    residual = make_rows(*grad_residual, normalized_dims);
    args.grad_residual = residual.tensor->const_data_ptr();
    args.grad_residual_rows = residual.layout;
  }
  const auto dx = write_gradient(grad_input, normalized_dims, args.grad_input, args.grad_input_rows);
  const int64_t count = rms_norm_backward_partials(args.dtype, args.grad_output_dtype, problem.rows, problem.cols,
                                                   problem.groups, device);
  launch_with_grad_weight(args, count, grad_weight, stream, [&] { launch_rms_norm_backward(args, device, stream); });
  if (dx.has_value()) dx->finish();
}

struct Backend : CudaBackend {
  static constexpr auto launch = run_rms_norm;
  static constexpr auto launch_backward = run_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { RmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cuda
