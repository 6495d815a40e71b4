// add_rms_norm on CUDA tensors.
#include "../add_rms_norm.h"
#include "../backend.h"
#include "add_rms_norm_launch.h"
#include "binding.h"

namespace normops::cuda {
namespace {

struct Backend : CudaBackend {
  static void launch(const AddRmsNorm& arguments, const Tensor& output, const Tensor& residual_out) {
    const auto& [input, residual, norm, alpha] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), r = make_rows(residual, norm.dims());
    const Target y(output, norm.dims()), h(residual_out, norm.dims());
    const Tensor w = contiguous_or_undefined(norm.weight);
    const AddRmsNormArgs args = {forward_args(problem, x, make_weight(w, norm, problem), y),
                                 dtype_of(residual),
                                 r.tensor->const_data_ptr(),
                                 r.layout,
                                 h.data(),
                                 h.layout(),
                                 alpha};
    launch_add_rms_norm(args, current_device(), current_stream(input));
    y.finish();
    h.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) { register_all<BackendKernels<Backend>>(m, List<AddRmsNorm>()); }

}  // namespace normops::cuda
