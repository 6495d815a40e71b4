#include "../gated_rms_norm.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "arguments.h"
#include "direct_call.h"

namespace normops::python {

PyObject* gated_rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input, gate;
  Shape normalized_shape;
  OptionalTensor weight;
  std::optional<double> eps;
  double weight_offset = 0;
  std::string_view activation;
  bool norm_before_gate = true;
  if (count != 8 || somebody_looks_on() || !parse(arguments[0], input) || !parse(arguments[1], gate) ||
      !parse(arguments[2], normalized_shape) || !parse(arguments[3], weight) || !parse(arguments[4], eps) ||
      !parse(arguments[5], weight_offset) || !parse(arguments[6], activation) ||
      !parse(arguments[7], norm_before_gate)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensor output;
  {
    pybind11::gil_scoped_release no_gil;
    output = gated_rms_norm_op().call(input, gate, normalized_shape, weight, eps, weight_offset, activation,
                                      norm_before_gate);
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

}  // namespace normops::python
