// The operators' checks, for the vmap and sharding rules in Python.
#pragma once
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../overloads.h"

namespace normops::python {

struct CheckOnly {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet, const Operator& arguments) {
    normops::check<Overload::functional>(arguments);
    return {};
  }
};

// Matches the arguments to the operator's schema and checks them.
template <class Operator>
void check(const pybind11::args& args, const pybind11::kwargs& kwargs) {
  const auto kernel =
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&Kernel<CheckOnly, Operator, Overload::functional>::call);
  auto stack = torch::jit::createStackForSchema(op<Operator>().schema(), args, kwargs, std::nullopt);
  kernel.callBoxed(op<Operator>(), c10::DispatchKeySet(), &stack);
}

}  // namespace normops::python
