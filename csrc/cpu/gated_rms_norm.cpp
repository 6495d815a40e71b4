// gated_rms_norm and gated_rms_norm_backward on CPU tensors.
#include "../gated_rms_norm.h"
#include "gated_rms_norm_kernel.h"
#include "launch.h"
#include "launch_backward.h"

namespace normops::cpu {
namespace {

struct Backend : CpuBackend {
  static void launch(const GatedRmsNorm& arguments, const Tensor& output) {
    const auto& [input, gate, norm, activation, norm_before_gate] = arguments;
    const Problem problem = make_problem(input, norm);
    const Rows x = make_rows(input, norm.dims()), g = make_rows(gate, norm.dims());
    const Target y(output, norm.dims());
    const Scale scale(norm, dtype_of(input), problem);
    const GatedRmsNormArgs args = {forward_args(problem, x, scale.weight(), y), arguments.gating(), dtype_of(gate),
                                   g.tensor->const_data_ptr(), g.layout};
    run_forward(gated_rms_norm_kernels(), cpu_args(args, 2), scale);
    y.finish();
  }

  static void launch(const GatedRmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_gate,
                     const Tensor& grad_weight) {
    const auto& [grad_output, input, gate, norm, activation, norm_before_gate, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const DType dtype = dtype_of(input);
    const Rows dy = make_rows(grad_output, norm.dims()), x = make_rows(input, norm.dims()),
               g = make_rows(gate, norm.dims());
    const Scale scale(norm, dtype, problem);
    auto args =
        cpu_backward_args(GatedRmsNormBackwardArgs{backward_args(problem, dy, x, scale.weight()), arguments.gating(),
                                                   dtype_of(gate), g.tensor->const_data_ptr(), g.layout},
                          5);
    const auto dx = write_if_wanted(grad_input, norm.dims(), args.grad_input, args.grad_input_rows);
    const auto dg = write_if_wanted(grad_gate, norm.dims(), args.grad_gate, args.grad_gate_rows);
    PartialSums partials(problem, args.rows_per_chunk, dtype, grad_weight);
    args.grad_weight_partials = partials.data();
    run_backward(gated_rms_norm_backward_kernels(), args, scale);
    if (dx.has_value()) dx->finish();
    if (dg.has_value()) dg->finish();
    partials.finish();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { register_kernels<Backend>(m, List<GatedRmsNorm, GatedRmsNormBackward>()); }

}  // namespace normops::cpu
