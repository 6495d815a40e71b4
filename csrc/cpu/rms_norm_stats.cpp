// rms_norm_stats, rms_norm_from_stats and their backwards on CPU tensors.
#include "../rms_norm_stats.h"

#include "launch.h"
#include "launch_backward.h"
#include "rms_norm_stats_kernel.h"

namespace normops::cpu {
namespace {

// Of kernels that read no scale.
struct NoScale {
  int64_t own_count() const { return 0; }
  const void* in(Scratch&) const noexcept { return nullptr; }
};

struct Backend : CpuBackend {
  static void launch(const RmsNormStats& arguments, const Tensor& output) {
    const auto& [input, normalized_shape] = arguments;
    const size_t dims = normalized_shape.size();
    const Rows x = make_rows(input, dims);
    const Target square_sum(output, 0);
    run_forward(rms_norm_stats_kernels().stats, cpu_args(stats_args(x, dims, square_sum), 1), NoScale());
    square_sum.finish();
  }

  static void launch(const RmsNormFromStats& arguments, const Tensor& output) {
    const auto& [input, square_sum, size, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), sums = make_rows(square_sum, 0);
    const Target y(output, norm.dims());
    const Scale scale(norm, dtype_of(input), problem);
    const RmsNormFromStatsArgs args = {forward_args(problem, x, scale.weight(), y), size.expect_int(),
                                       sums.tensor->const_data_ptr(), sums.layout};
    run_forward(rms_norm_stats_kernels().from_stats, cpu_args(args, 2), scale);
    y.finish();
  }

  static void launch(const RmsNormBackwardStats& arguments, const Tensor& square_sum, const Tensor& dot) {
    const auto& [grad_output, input, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Target squares(square_sum, 0), dots(dot, 0);
    const Scale scale(norm, dtype_of(input), problem);
    const RmsNormBackwardStatsArgs args = {backward_args(problem, dy, x, scale.weight()), squares.data(),
                                           squares.layout(), dots.data(), dots.layout()};
    run_backward(rms_norm_backward_stats_kernels().stats, cpu_backward_args(args, 2), scale);
    squares.finish();
    dots.finish();
  }

  // grad_input and grad_weight may be undefined: then they are not wanted.
  static void launch(const RmsNormBackwardFromStats& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, square_sum, dot, size, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const DType dtype = dtype_of(input);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Rows squares = make_rows(square_sum, 0), dots = make_rows(dot, 0);
    const Scale scale(norm, dtype, problem);
    auto args =
        cpu_backward_args(RmsNormBackwardFromStatsArgs{backward_args(problem, dy, x, scale.weight()), size.expect_int(),
                                                       squares.tensor->const_data_ptr(), squares.layout,
                                                       dots.tensor->const_data_ptr(), dots.layout},
                          3);
    const Rows residual = read_if_given(grad_residual, norm.dims(), args.grad_residual, args.grad_residual_rows);
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight);
    args.grad_weight_partials = partials.data();
    run_backward(rms_norm_backward_stats_kernels().from_stats, args, scale);
    if (dx.has_value()) dx->finish();
    partials.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) {
  register_kernels<Backend>(m, List<RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>());
}

}  // namespace normops::cpu
