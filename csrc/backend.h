// The operators of a backend that has kernels of its own: what to check and to allocate around them.
#pragma once
#include <algorithm>

#include "composite/fallback.h"
#include "rms_norm.h"

namespace normops {

// Backend has, besides
//   Guard, made of the input's device and kept while kernels are launched, and
//   empty_contiguous(like),
//   supports(arguments), whether it has kernels for them; else the definition serves, and
// for each operator, on arguments that passed the check and have elements, where some output is wanted,
//   launch(arguments, outputs)
template <class Backend>
struct BackendKernels {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet keys, const Operator& arguments) {
    check<Overload::functional>(arguments);
    if constexpr (kMayDecline<Operator>) {
      if (!Backend::supports(arguments)) return Fallback::functional(keys, arguments);
    }
    const typename Backend::Guard guard(arguments.input.device());
    Outputs<Operator> outputs = new_outputs(arguments, Backend::empty_contiguous);
    run(arguments, std::apply([](auto&... output) { return OutputPtrs<Operator>{&output...}; }, outputs));
    return outputs;
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
    check_write<overload>(arguments, targets);
    if constexpr (kMayDecline<Operator>) {
      if (!Backend::supports(arguments)) return Fallback::write<overload>(keys, arguments, targets);
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
