// rms_norm_rope on CUDA tensors.
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
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { register_all<BackendKernels<Backend>>(m, List<RmsNormRope>()); }

}  // namespace normops::cuda
