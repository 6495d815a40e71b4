// Conversion of Python arguments for direct calls. parse() returns false for an object that it does not recognise.
#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/critical_section.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "../check.h"

namespace normops::python {

inline bool is_intercepted() { return at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing(); }

// Accepts tensors and parameters, but no subclasses: those may define __torch_function__.
inline bool parse(PyObject* object, Tensor& tensor) {
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

inline bool parse(PyObject* object, OptionalTensor& tensor) {
  if (object == Py_None) return true;
  return parse(object, tensor.emplace());
}

inline bool parse(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}

// The result borrows the memory of the argument.
inline bool parse(PyObject* object, std::string_view& text) {
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) {  // a lone surrogate: torch.ops raises the error
    PyErr_Clear();
    return false;
  }
  text = {data, static_cast<size_t>(size)};
  return true;
}

inline bool parse(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

inline bool parse(PyObject* object, double& number) {
  if (PyFloat_CheckExact(object)) {
    number = PyFloat_AS_DOUBLE(object);
    return true;
  }
  int64_t integer = 0;
  const bool is_integer = parse(object, integer);
  number = static_cast<double>(integer);
  return is_integer;
}

inline bool parse(PyObject* object, c10::SymInt& number) {
  int64_t value = 0;
  if (!parse(object, value)) return false;
  number = c10::SymInt(value);
  return true;
}

template <class Number>
bool parse(PyObject* object, std::optional<Number>& number) {
  if (object == Py_None) return true;
  return parse(object, number.emplace());
}

using Shape = c10::SmallVector<c10::SymInt, 4>;

inline bool parse(PyObject* object, Shape& shape) {
  if (PyLong_CheckExact(object)) return parse(object, shape.emplace_back());
  if (!PyTuple_Check(object) && !PyList_CheckExact(object)) return false;
  const pybind11::scoped_critical_section section(object);  // without a GIL other threads may change a list meanwhile
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < size; i++) {
    if (!parse(PySequence_Fast_GET_ITEM(object, i), shape.emplace_back())) return false;
  }
  return true;
}

// While torch.jit.trace records, sizes are tensors, which torch.ops would convert to numbers. The tensors that are
// stashed under the argument's name are recorded instead, as in torch's own argument parser.
inline std::vector<int64_t> traced_shape(const std::vector<std::variant<Tensor, int64_t>>& normalized_shape) {
  std::vector<int64_t> sizes;
  for (const auto& size : normalized_shape) {
    const Tensor* tensor = std::get_if<Tensor>(&size);
    sizes.push_back(tensor == nullptr ? std::get<int64_t>(size) : tensor->item<int64_t>());
  }
  for (size_t i = 0; i < sizes.size(); i++) {
    if (const Tensor* tensor = std::get_if<Tensor>(&normalized_shape[i])) {
      torch::jit::tracer::ArgumentStash::stashIntArrayRefElem("normalized_shape", sizes.size(), i, *tensor);
    }
  }
  return sizes;
}

}  // namespace normops::python
