// Direct calls of the dispatcher from Python. torch.ops matches arguments to the schema at run time, which takes longer
// than a small norm; these functions know their schema. They return NotImplemented if calls are intercepted (by
// __torch_function__ or torch.jit.trace), or if an argument does not have exactly the expected type. The caller then
// uses torch.ops.
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "../operator.h"
#include "arguments.h"

namespace normops::python {

template <class Arguments>
struct ParsedArguments;
template <class... Arguments>
struct ParsedArguments<std::tuple<const Arguments&...>> {
  using type = std::tuple<std::conditional_t<std::is_same_v<Arguments, c10::SymIntArrayRef>, Shape, Arguments>...>;
};

// Positional arguments, in the schema's order.
template <class Operator>
PyObject* direct_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  typename ParsedArguments<detail::Flat<Operator>>::type parsed{};
  const auto parse_all = [&](auto&... argument) {
    return count == sizeof...(argument) && !is_intercepted() && (parse(*arguments++, argument) && ...);
  };
  if (!std::apply(parse_all, parsed)) Py_RETURN_NOTIMPLEMENTED;
  Outputs<Operator> outputs;
  {
    pybind11::gil_scoped_release no_gil;
    outputs =
        std::apply([](auto&... argument) { return to_array<Operator>(op<Operator>().call(argument...)); }, parsed);
  }
  if constexpr (Operator::kOutputs == 1) return THPVariable_Wrap(std::move(outputs[0]));
  const auto wrap = [](Tensor& tensor) {
    return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(tensor)));
  };
  return std::apply([&](auto&... output) { return pybind11::make_tuple(wrap(output)...); }, outputs).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace normops::python
