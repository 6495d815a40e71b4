// The fallback for devices without a kernel: runs the operators' definitions in ATen operators.
#pragma once
#include "../overloads.h"

namespace normops {

struct Fallback {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet, const Operator& arguments) {
    check<Overload::functional>(arguments);
    return run_composite(arguments);
  }

  template <class Operator>
  static Outputs<Operator> run_composite(const Operator& arguments) {
    auto outputs = to_array<Operator>(composite(arguments));
    for (Tensor& output : outputs) {
      if (output.defined()) output = output.contiguous();
    }
    return outputs;
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet, const Operator& arguments, const Targets<Operator>& targets) {
    check_write<overload>(arguments, targets);
    const auto outputs = to_array<Operator>(composite(arguments));
    for (size_t i = 0; i < outputs.size(); i++) {
      if (outputs[i].defined()) targets[i]->copy_(outputs[i]);
    }
  }
};

}  // namespace normops
