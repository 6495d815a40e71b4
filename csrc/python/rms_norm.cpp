#include "../rms_norm.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "arguments.h"
#include "direct_call.h"

namespace normops::python {

PyObject* rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input;
  Shape normalized_shape;
  OptionalTensor weight;
  std::optional<double> eps;
  double weight_offset = 0;
  if (count != 5 || somebody_looks_on() || !parse(arguments[0], input) || !parse(arguments[1], normalized_shape) ||
      !parse(arguments[2], weight) || !parse(arguments[3], eps) || !parse(arguments[4], weight_offset)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensor output;
  {
    pybind11::gil_scoped_release no_gil;
    output = rms_norm_op().call(input, normalized_shape, weight, eps, weight_offset);
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

}  // namespace normops::python
