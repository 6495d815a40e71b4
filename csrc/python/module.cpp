// The Python module normops._C: build information, checks for the vmap and sharding rules in Python, and direct calls.
// Loading it registers the operators.
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "../cpu/division.h"
#include "../cpu/isa.h"
#include "../operators.h"
#include "../recompute.h"
#include "arguments.h"
#include "check.h"
#include "direct_call.h"
#include "registration.h"
#ifdef NORMOPS_WITH_CUDA
#include "../cuda/build_info.h"
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = NORMOPS_VERSION;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cpu_isas"] = normops::cpu::compiled_isas();
  info["cpu_isa"] = normops::cpu::isa_name(normops::cpu::current_isa());
#ifdef NORMOPS_WITH_CUDA
  info["cuda_archs"] = normops::cuda::compiled_archs();
  info["cuda_version"] = normops::cuda::compiled_version();
#else
  info["cuda_archs"] = std::vector<std::string>();
  info["cuda_version"] = py::none();
#endif
  return info;
}

// Returns the number of elements of each part of a CPU backward with `threads` threads, to measure scaling.
std::vector<int64_t> elements_of_parts(int64_t rows, int64_t cols, int64_t groups, bool sums_rows, int64_t threads) {
  using namespace normops::cpu;
  if (groups < 1 || rows % groups != 0) throw std::invalid_argument("groups: expected a divisor of rows");
  const Division division(rows, cols, groups, sums_rows);
  std::vector<int64_t> elements(part_count(division.units(), division.grain(), threads));
  for (size_t part = 0; part < elements.size(); part++) {
    division.each_region_of_part(part, elements.size(),
                                 [&](const Region& region) { elements[part] += region.rows * region.groups * cols; });
  }
  return elements;
}

using FastCall = PyObject*(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction as_method(FastCall* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <class... Operators>
PyMethodDef* direct_calls(normops::List<Operators...>) {
  static PyMethodDef methods[] = {
      {Operators::kName, as_method(normops::python::direct_call<Operators>), METH_FASTCALL, nullptr}...,
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

// Defines functions that only check an operator's arguments, which are matched to its schema.
template <class... Operators>
void define_checks(py::module& m, normops::List<Operators...>) {
  (m.def((std::string("check_") + Operators::kName).c_str(), normops::python::check<Operators>), ...);
}

// Maps the name of each operator to that of its in-place overload or None.
template <class... Operators>
py::dict operators(normops::List<Operators...>) {
  py::dict names;
  const auto add = [&](const char* name, const char* inplace_name) { names[name] = inplace_name; };
  (add(Operators::kName, Operators::kInplaceName), ...);
  return names;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m, py::mod_gil_not_used()) {
  normops::cpu::current_isa();  // a wrong NORMOPS_CPU_ISA makes the import fail, not the first call
  normops::initialize_statics(normops::Operators());
  normops::initialize_statics_of_library();

  if (PyModule_AddFunctions(
          m.ptr(),
          direct_calls(
              normops::List<normops::RmsNorm, normops::AddRmsNorm, normops::GatedRmsNorm, normops::RmsNormRope>())) !=
      0)
    throw py::error_already_set();

  py::class_<normops::python::Registration>(m, "Registration").def("close", &normops::python::Registration::close);
  m.def("register_triton", normops::triton::register_operators, py::arg("dispatch_key"));
  m.def("register_triton_channels", normops::triton::register_channel_operators, py::arg("dispatch_key"));
  m.def("override_torch", normops::python::override_torch);
  m.def("traced_shape", normops::python::traced_shape, py::arg("normalized_shape"));

  using normops::Recomputation, normops::RecomputedOutput;
  m.def("enter_recompute_block", &Recomputation::enter_block);
  m.def("leave_recompute_block", &Recomputation::leave_block, py::arg("outer"));
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<RecomputedOutput>(m, "RecomputedOutput")
      .def_static("is_recomputed", &RecomputedOutput::is_recomputed, py::arg("tensor"), py::arg("block"))
      .def_static("of", &RecomputedOutput::of, py::arg("tensor"), no_gil)
      .def("tensor", &RecomputedOutput::tensor, no_gil);

  m.def("build_info", build_info);
  m.def("elements_of_parts", elements_of_parts, py::arg("rows"), py::arg("cols"), py::arg("groups"),
        py::arg("sums_rows"), py::arg("threads"));
  m.def("operators", [] { return operators(normops::Operators()); });
  define_checks(m, normops::Operators());
}
