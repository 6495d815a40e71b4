// Calls from Python that go straight to the dispatcher. torch.ops matches arguments to the schema at run time, which
// takes longer than a small norm; these functions know their schema. Where somebody has to see the call who looks at
// Python (a
// __torch_function__, torch.jit.trace), or an argument is not plainly of its type, they return NotImplemented, and the
// caller goes through torch.ops.
#pragma once
#include <Python.h>

namespace normops::python {

// One function per operator: positional arguments, in the schema's order.
PyObject* rms_norm(PyObject* module, PyObject* const* arguments, Py_ssize_t count);
PyObject* add_rms_norm(PyObject* module, PyObject* const* arguments, Py_ssize_t count);
PyObject* gated_rms_norm(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace normops::python
