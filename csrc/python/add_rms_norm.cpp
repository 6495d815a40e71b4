#include "../add_rms_norm.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "arguments.h"
#include "direct_call.h"

namespace normops::python {

PyObject* add_rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor input, residual;
  Shape normalized_shape;
  OptionalTensor weight;
  std::optional<double> eps;
  double weight_offset = 0;
  if (count != 6 || somebody_looks_on() || !parse(arguments[0], input) || !parse(arguments[1], residual) ||
      !parse(arguments[2], normalized_shape) || !parse(arguments[3], weight) || !parse(arguments[4], eps) ||
      !parse(arguments[5], weight_offset)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensor output, residual_out;
  {
    pybind11::gil_scoped_release no_gil;
    std::tie(output, residual_out) =
        add_rms_norm_op().call(input, residual, normalized_shape, weight, eps, weight_offset);
  }
  const auto wrap = [](Tensor& tensor) {
    return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(tensor)));
  };
  return pybind11::make_tuple(wrap(output), wrap(residual_out)).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace normops::python
