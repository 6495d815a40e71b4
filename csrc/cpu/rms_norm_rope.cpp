// rms_norm_rope and rms_norm_rope_backward on CPU tensors.
#include "../rms_norm_rope.h"
#include "launch.h"
#include "launch_backward.h"
#include "rms_norm_rope_kernel.h"

namespace normops::cpu {
namespace {

struct Backend : CpuBackend {
  static void launch(const RmsNormRope& arguments, const Tensor& output) {
    const auto& [input, cos, sin, norm, rope] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims());
    const Tables tables(input, cos, sin);
    const Rotation rotation = make_rotation(tables, rope);
    const Target y(output, norm.dims());
    const DType dtype = dtype_of(input);
    const Scale scale(norm, dtype, problem, {dtype, problem.cols, paired_columns(rotation)});
    const RmsNormRopeArgs args = {forward_args(problem, x, scale.weight(), y), rotation};
    run_forward(rms_norm_rope_kernels(), cpu_args(args, 2), scale);
    y.finish();
  }

  static void launch(const RmsNormRopeBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, cos, sin, norm, rope, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Tables tables(input, cos, sin);
    const Rotation rotation = make_rotation(tables, rope);
    const DType dtype = dtype_of(input);
    const HeldOrder order(dtype, problem.cols, paired_columns(rotation));
    const Scale scale(norm, dtype, problem, order);
    auto args = cpu_backward_args(RmsNormRopeBackwardArgs{backward_args(problem, dy, x, scale.weight()), rotation}, 3);
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight, order);
    args.grad_weight_partials = partials.data();
    run_backward(rms_norm_rope_backward_kernels(), args, scale);
    if (dx.has_value()) dx->finish();
    partials.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { register_kernels<Backend>(m, List<RmsNormRope, RmsNormRopeBackward>()); }

}  // namespace normops::cpu
