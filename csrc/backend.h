// The operators of a backend with kernels: checks the arguments and allocates the outputs before each launch.
//
// The functions that a call goes through: direct_call() (python/direct_call.h), Autograd::functional() and its
// OperatorNode (autograd/), BackendKernels::functional() and run(), here; then the backend's launch(), which converts
// the arguments to TensorArgs (tensor_args.h). On a CPU, run_forward() or run_backward() (cpu/sharing.h) divides rows
// among threads, and ForwardKernelsOf::rows() or BackwardKernelsOf::rows() (cpu/*.inl) loops over them. On a GPU,
// launch_*() (cuda/*.cu) selects one of an operator's kernels.
#pragma once
#include <algorithm>

#include "composite/kernels.h"
#include "rms_norm.h"

namespace normops {

// Backend provides
//   Guard                       constructed from the input's device, kept while kernels are launched
//   empty_contiguous(like)      allocates an output
//   supports(arguments)         for operators with a bias: whether it has kernels; if not, the composite runs
//   launch(arguments, outputs)  launches an operator's kernels. The arguments passed the check, the input has elements,
//                               and at least one output is wanted.
template <class Backend>
struct BackendKernels {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet keys, const Operator& arguments) {
    check<Overload::functional>(arguments);
    check_memory<Overload::functional>(arguments);
    if constexpr (kMayDecline<Operator>) {
      if (!Backend::supports(arguments)) return Composite::functional(keys, arguments);
    }
    const typename Backend::Guard guard(arguments.input.device());
    Outputs<Operator> outputs = new_outputs(arguments, Backend::empty_contiguous);
    run(arguments, std::apply([](auto&... output) { return OutputPtrs<Operator>{&output...}; }, outputs));
    return outputs;
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
    check_write<overload>(arguments, targets);
    check_memory<overload>(arguments, targets);
    if constexpr (kMayDecline<Operator>) {
      if (!Backend::supports(arguments)) return Composite::write<overload>(keys, arguments, targets);
    }
    const typename Backend::Guard guard(arguments.input.device());
    const Like<Operator> like = arguments.like();
    OutputPtrs<Operator> outputs;
    for (size_t i = 0; i < outputs.size(); i++) outputs[i] = &defined_if(like[i].is_wanted(), *targets[i]);
    run(arguments, outputs);
  }

 private:
  template <class Operator>
  static constexpr bool kMayDecline = requires(const Operator& arguments) { arguments.bias; };

  template <class Operator>
  static void run(const Operator& arguments, const OutputPtrs<Operator>& outputs) {
    const auto is_wanted = [](const Tensor* output) { return output->defined(); };
    if (std::none_of(outputs.begin(), outputs.end(), is_wanted)) return;
    if (arguments.input.numel() > 0) {
      Backend::launch(arguments, outputs);
    } else {
      for (const Tensor* output : outputs) {
        if (is_wanted(output) && output->numel() > 0) output->zero_();  // a sum over no rows
      }
    }
  }
};

}  // namespace normops
