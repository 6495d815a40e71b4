// rms_norm and rms_norm_backward on CPU tensors: lays the problem out for the kernels and shares it among the threads.
#include "../rms_norm.h"
#include "launch.h"
#include "launch_backward.h"

namespace normops::cpu {
namespace {

struct Backend : CpuBackend {
  static void launch(const RmsNorm& arguments, const Tensor& output) {
    const auto& [input, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims());
    const Target y(output, norm.dims());
    const Scale scale(norm, dtype_of(input), problem);
    run_forward(rms_norm_kernels().forward, cpu_args(forward_args(problem, x, scale.weight(), y), 2), scale);
    y.finish();
  }

  // grad_input and grad_weight may be undefined: then they are not wanted.
  static void launch(const RmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const DType dtype = dtype_of(input);
    const Rows dy = make_rows(grad_output, norm.dims());
    const Rows x = make_rows(input, norm.dims());
    const Scale scale(norm, dtype, problem);
    auto args = cpu_backward_args(backward_args(problem, dy, x, scale.weight()), 3);
    const Rows residual = read_if_given(grad_residual, norm.dims(), args.grad_residual, args.grad_residual_rows);
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight);
    args.grad_weight_partials = partials.data();
    run_backward(rms_norm_backward_kernels().backward, args, scale);
    if (dx.has_value()) dx->finish();
    partials.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { register_kernels<Backend>(m, List<RmsNorm, RmsNormBackward>()); }

}  // namespace normops::cpu
