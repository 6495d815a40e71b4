// add_rms_norm on CPU tensors.
#include "../add_rms_norm.h"
#include "add_rms_norm_kernel.h"
#include "launch.h"

namespace normops::cpu {
namespace {

struct Backend : CpuBackend {
  static void launch(const AddRmsNorm& arguments, const Tensor& output, const Tensor& residual_out) {
    const auto& [input, residual, norm, alpha] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), r = make_rows(residual, norm.dims());
    const Target y(output, norm.dims()), h(residual_out, norm.dims());
    const Scale scale(norm, dtype_of(residual), problem);
    const AddRmsNormArgs args = {forward_args(problem, x, scale.weight(), y),
                                 dtype_of(residual),
                                 r.tensor->const_data_ptr(),
                                 r.layout,
                                 h.data(),
                                 h.layout(),
                                 alpha};
    run_forward(add_rms_norm_kernels(), cpu_args(args, 2), scale);
    y.finish();
    h.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { register_kernels<Backend>(m, List<AddRmsNorm>()); }

}  // namespace normops::cpu
