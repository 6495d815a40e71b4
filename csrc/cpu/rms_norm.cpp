// rms_norm and rms_norm_backward on CPU tensors: lays the problem out for the kernels and shares it among the threads.
#include "../rms_norm_backend.h"

#include "launch.h"
#include "launch_backward.h"

namespace normops::cpu {
namespace {

void launch_rms_norm(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims);
  const Target y(output, normalized_dims);
  const Scale scale(weight, weight_offset, dtype_of(input), problem);
  run_forward(rms_norm_kernels().forward, forward_args(problem, x, y), scale, problem.rows);
  y.finish();
}

// grad_input and grad_weight may be undefined: then they are not wanted.
void launch_rms_norm_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                              const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                              const OptionalTensor& grad_residual, const Tensor& grad_input,
                              const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const DType dtype = dtype_of(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims);
  const Scale scale(weight, weight_offset, dtype, problem);
  RmsNormBackwardArgs args = backward_args(problem, dy, x);
  Rows residual;
  if (is_given(grad_residual)) {
    residual = make_rows(*grad_residual, normalized_dims);
    args.grad_residual = residual.tensor->const_data_ptr();
    args.grad_residual_rows = residual.layout;
  }
  std::optional<Target> dx;
  if (grad_input.defined()) {
    dx.emplace(grad_input, normalized_dims);
    args.grad_input = dx->data();
    args.grad_input_rows = dx->layout();
  }
  PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight,
                       {&grad_output, &input, &value_or_undefined(weight), &value_or_undefined(grad_residual)});
  args.grad_weight_partials = partials.data();
  run_backward(rms_norm_backward_kernels().backward, args, scale);
  if (dx.has_value()) dx->finish();
  partials.finish();
}

struct Backend : CpuBackend {
  static constexpr auto launch = launch_rms_norm;
  static constexpr auto launch_backward = launch_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { RmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cpu
