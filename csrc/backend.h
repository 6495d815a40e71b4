// The operators of a backend that has kernels of its own: what to check and to allocate around them.
#pragma once
#include <algorithm>

#include "composite/fallback.h"
#include "composite/rms_norm.h"

namespace normops {

// Backend has, besides
//   Guard, made of the input's device and kept while kernels are launched, and
//   empty_contiguous(like),
//   kTakesBias, whether its kernels do; else a call with one is left to the definition, and
// for each operator, on arguments that passed the check and have elements, where some output is wanted,
//   launch(arguments, outputs)
template <class Backend>
struct BackendKernels {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet keys, const Operator& arguments) {
    if constexpr (leaves<Operator>) {
      if (arguments.uses_bias()) return Fallback::functional(keys, arguments);
    }
    check<Overload::functional>(arguments);
    const typename Backend::Guard guard(arguments.input.device());
    Outputs<Operator> outputs = new_outputs(arguments, Backend::empty_contiguous);
    run(arguments, std::apply([](auto&... output) { return Written<Operator>{&output...}; }, outputs));
    return outputs;
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
    if constexpr (leaves<Operator>) {
      if (arguments.uses_bias()) return Fallback::write<overload>(keys, arguments, targets);
    }
    check_write<overload>(arguments, targets);
    const typename Backend::Guard guard(arguments.input.device());
    const Like<Operator> like = arguments.like();
    Written<Operator> outputs;
    for (size_t i = 0; i < outputs.size(); i++) outputs[i] = &if_wanted(like[i].is_wanted(), *targets[i]);
    run(arguments, outputs);
  }

 private:
  template <class Operator>
  static constexpr bool leaves = !Backend::kTakesBias && requires(const Operator& arguments) { arguments.uses_bias(); };

  template <class Operator>
  static void run(const Operator& arguments, const Written<Operator>& outputs) {
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
