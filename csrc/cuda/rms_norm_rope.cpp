// rms_norm_rope and rms_norm_rope_backward on CUDA tensors.
#include "../rms_norm_rope.h"
#include "../backend.h"
#include "binding.h"
#include "rms_norm_rope_launch.h"

namespace normops::cuda {
namespace {

struct Backend : CudaBackend {
  static void launch(const RmsNormRope& arguments, const Tensor& output) {
    const auto& [input, cos, sin, norm, rope] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims());
    const Tables tables(input, cos, sin);
    const Target y(output, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    const RmsNormRopeArgs args = {forward_args(problem, x, make_weight(w, norm, problem), y),
                                  make_rotation(tables, rope)};
    launch_rms_norm_rope(args, current_device(), current_stream(input));
    y.finish();
  }

  static void launch(const RmsNormRopeBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, cos, sin, norm, rope, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const Device device = current_device();
    const Stream stream = current_stream(input);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims());
    const Tables tables(input, cos, sin);
    const Tensor w = contiguous_or_undefined(norm.weight);
    RmsNormRopeBackwardArgs args = {backward_args(problem, dy, x, make_weight(w, norm, problem)),
                                    make_rotation(tables, rope)};
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    const int64_t count =
        rms_norm_rope_backward_partials(args.dtype, problem.rows, problem.cols, problem.groups, args.rotation, device);
    launch_with_grad_weight(args, count, grad_weight, stream,
                            [&] { launch_rms_norm_rope_backward(args, device, stream); });
    if (dx.has_value()) dx->finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) {
  register_all<BackendKernels<Backend>>(m, List<RmsNormRope, RmsNormRopeBackward>());
}

}  // namespace normops::cuda
