// The Python module normops._C: what this build is, the operators' checks for rules written in Python, direct calls.
// Loading it registers the operators.
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "../add_rms_norm.h"
#include "../cpu/isa.h"
#include "../gated_rms_norm.h"
#include "../rms_norm.h"
#include "arguments.h"
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

using FastCall = PyObject*(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction as_method(FastCall* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef direct_calls[] = {
    {"rms_norm", as_method(normops::python::rms_norm), METH_FASTCALL, nullptr},
    {"add_rms_norm", as_method(normops::python::add_rms_norm), METH_FASTCALL, nullptr},
    {"gated_rms_norm", as_method(normops::python::gated_rms_norm), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  normops::cpu::current_isa();  // a wrong NORMOPS_CPU_ISA is an error of the import, not of the first call

  if (PyModule_AddFunctions(m.ptr(), direct_calls) != 0) throw py::error_already_set();

  py::class_<normops::python::Registration>(m, "Registration").def("close", &normops::python::Registration::close);
  m.def("register_triton", normops::python::register_triton, py::arg("dispatch_key"));
  m.def("override_torch", normops::python::override_torch);
  m.def("traced_shape", normops::python::traced_shape, py::arg("normalized_shape"));

  m.def("build_info", build_info);
  m.def(
      "check_rms_norm",
      [](const at::Tensor& input, const std::vector<c10::SymInt>& normalized_shape,
         const std::optional<at::Tensor>& weight,
         std::optional<double> eps) { normops::check_rms_norm(input, normalized_shape, weight, eps); },
      py::arg("input"), py::arg("normalized_shape"), py::arg("weight") = py::none(), py::arg("eps") = py::none());
  m.def(
      "check_add_rms_norm",
      [](const at::Tensor& input, const at::Tensor& residual, const std::vector<c10::SymInt>& normalized_shape,
         const std::optional<at::Tensor>& weight,
         std::optional<double> eps) { normops::check_add_rms_norm(input, residual, normalized_shape, weight, eps); },
      py::arg("input"), py::arg("residual"), py::arg("normalized_shape"), py::arg("weight") = py::none(),
      py::arg("eps") = py::none());
  m.def(
      "check_rms_norm_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const std::vector<c10::SymInt>& normalized_shape,
         const std::optional<at::Tensor>& weight, std::optional<double> eps,
         const std::optional<at::Tensor>& grad_residual) {
        normops::check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
      },
      py::arg("grad_output"), py::arg("input"), py::arg("normalized_shape"), py::arg("weight") = py::none(),
      py::arg("eps") = py::none(), py::arg("grad_residual") = py::none());
  m.def(
      "check_gated_rms_norm",
      [](const at::Tensor& input, const at::Tensor& gate, const std::vector<c10::SymInt>& normalized_shape,
         const std::optional<at::Tensor>& weight, std::optional<double> eps, std::string_view activation) {
        normops::check_gated_rms_norm(input, gate, normalized_shape, weight, eps, activation,
                                      /*norm_before_gate=*/true);
      },
      py::arg("input"), py::arg("gate"), py::arg("normalized_shape"), py::arg("weight") = py::none(),
      py::arg("eps") = py::none(), py::arg("activation") = "silu");
  m.def(
      "check_gated_rms_norm_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& gate,
         const std::vector<c10::SymInt>& normalized_shape, const std::optional<at::Tensor>& weight,
         std::optional<double> eps, std::string_view activation) {
        normops::check_gated_rms_norm_backward(grad_output, input, gate, normalized_shape, weight, eps, activation,
                                               /*norm_before_gate=*/true);
      },
      py::arg("grad_output"), py::arg("input"), py::arg("gate"), py::arg("normalized_shape"),
      py::arg("weight") = py::none(), py::arg("eps") = py::none(), py::arg("activation") = "silu");
}
