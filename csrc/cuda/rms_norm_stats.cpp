// rms_norm_stats, rms_norm_from_stats and their backwards on CUDA tensors.
#include "../rms_norm_stats.h"
#include "../backend.h"
#include "binding.h"
#include "rms_norm_launch.h"

namespace normops::cuda {
namespace {

struct Backend : CudaBackend {
  static void launch(const RmsNormStats& arguments, const Tensor& output) {
    const auto& [input, normalized_shape] = arguments;
    const size_t dims = normalized_shape.size();
    const Rows x = make_rows(input, dims);
    const Target square_sum(output, 0);
    launch_rms_norm_stats(stats_args(x, dims, square_sum), current_device(), current_stream(input));
    square_sum.finish();
  }

  static void launch(const RmsNormFromStats& arguments, const Tensor& output) {
    const auto& [input, square_sum, size, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), sums = make_rows(square_sum, 0);
    const Target y(output, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    const RmsNormFromStatsArgs args = {forward_args(problem, x, make_weight(w, norm, problem), y), size.expect_int(),
                                       sums.tensor->const_data_ptr(), sums.layout};
    launch_rms_norm_from_stats(args, current_device(), current_stream(input));
    y.finish();
  }

  static void launch(const RmsNormBackwardStats& arguments, const Tensor& square_sum, const Tensor& dot) {
    const auto& [grad_output, input, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Target squares(square_sum, 0), dots(dot, 0);
    const Tensor w = contiguous_or_undefined(norm.weight);
    const RmsNormBackwardStatsArgs args = {backward_args(problem, dy, x, make_weight(w, norm, problem)), squares.data(),
                                           squares.layout(), dots.data(), dots.layout()};
    launch_rms_norm_backward_stats(args, current_device(), current_stream(input));
    squares.finish();
    dots.finish();
  }

  // grad_input and grad_weight may be undefined: then they are not wanted.
  static void launch(const RmsNormBackwardFromStats& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, square_sum, dot, size, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const Device device = current_device();
    const Stream stream = current_stream(input);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Rows squares = make_rows(square_sum, 0), dots = make_rows(dot, 0);
    const Tensor w = contiguous_or_undefined(norm.weight);
    RmsNormBackwardFromStatsArgs args = {backward_args(problem, dy, x, make_weight(w, norm, problem)),
                                         size.expect_int(),
                                         squares.tensor->const_data_ptr(),
                                         squares.layout,
                                         dots.tensor->const_data_ptr(),
                                         dots.layout};
    const Rows residual = read_if_given(grad_residual, norm.dims(), args.grad_residual, args.grad_residual_rows);
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    const int64_t count = rms_norm_backward_partials(args.dtype, args.grad_output_dtype, problem.rows, problem.cols,
                                                     problem.groups, device);
    launch_with_grad_weight(args, count, grad_weight, stream,
                            [&] { launch_rms_norm_backward_from_stats(args, device, stream); });
    if (dx.has_value()) dx->finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) {
  register_all<BackendKernels<Backend>>(
      m, List<RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>());
}

}  // namespace normops::cuda
