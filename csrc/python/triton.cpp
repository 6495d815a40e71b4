// The operators with kernels in Triton: the same operator functions as those of the C++ backends, whose launchers are
// functions of the Python module normops.triton.
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include "../add_rms_norm_backend.h"
#include "../gated_rms_norm_backend.h"
#include "../problem.h"
#include "../rms_norm_backend.h"
#include "registration.h"

namespace normops::python {
namespace {

namespace py = pybind11;

constexpr int kMaxDims = 2;  // that the kernels tell rows apart by

struct TritonBackend {
  using Guard = c10::DeviceGuard;
  static Tensor empty_contiguous(const Tensor& like) { return at::empty_like(like, at::MemoryFormat::Contiguous); }
};

// Imported when it is first needed: Triton takes a second. Importing lets other threads run, which come here too: one
// that waits for a plain static does so with the GIL, which the import then waits for.
py::handle launchers() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::module_> module;
  return module.call_once_and_store_result([] { return py::module_::import("normops.triton"); }).get_stored();
}

py::object to_python(const Tensor& tensor, const RowLayout& layout) {
  // For inner = 1 Triton makes code that does not divide.
  const bool is_nested = layout.dims > 1;
  return launchers().attr("Rows")(tensor, is_nested ? layout.sizes[1] : 1, layout.strides[0],
                                  is_nested ? layout.strides[1] : 0);
}

py::object to_python(const Rows& rows) {
  return rows.tensor->defined() ? to_python(*rows.tensor, rows.layout) : py::object(py::none());
}

py::object to_python(const std::optional<Target>& target) {
  return target.has_value() ? to_python(target->rows()) : py::object(py::none());
}

const char* to_python(Activation activation) { return activation == Activation::silu ? "silu" : "sigmoid"; }

Rows make_rows_or_none(const OptionalTensor& tensor, size_t normalized_dims) {
  return is_given(tensor) ? make_rows(*tensor, normalized_dims, kMaxDims) : Rows();
}

OptionalTensor contiguous(const OptionalTensor& weight) {
  return is_given(weight) ? OptionalTensor(weight->contiguous()) : std::nullopt;
}

void launch_forward(const Tensor& input, const OptionalTensor& residual, size_t normalized_dims,
                    const OptionalTensor& weight, std::optional<double> eps, double weight_offset, const Tensor& output,
                    const OptionalTensor& residual_out) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Target y(output, normalized_dims, kMaxDims);
  std::optional<Target> h;
  if (is_given(residual_out)) h.emplace(*residual_out, normalized_dims, kMaxDims);
  {
    py::gil_scoped_acquire gil;
    launchers().attr("launch_forward")(to_python(make_rows(input, normalized_dims, kMaxDims)),
                                       to_python(make_rows_or_none(residual, normalized_dims)), to_python(y.rows()),
                                       to_python(h), contiguous(weight), weight_offset, problem.eps, problem.groups,
                                       problem.rows, problem.cols);
  }
  y.finish();
  if (h.has_value()) h->finish();
}

struct RmsNormBackend : TritonBackend {
  static void launch(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, const Tensor& output) {
    launch_forward(input, std::nullopt, normalized_dims, weight, eps, weight_offset, output, std::nullopt);
  }

  // grad_input and grad_weight may be undefined: then they are not wanted.
  static void launch_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                              const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                              const OptionalTensor& grad_residual, const Tensor& grad_input,
                              const Tensor& grad_weight) {
    const Problem problem = make_problem(input, normalized_dims, weight, eps);
    std::optional<Target> dx;
    if (grad_input.defined()) dx.emplace(grad_input, normalized_dims, kMaxDims);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_backward")(to_python(make_rows(grad_output, normalized_dims, kMaxDims)),
                                        to_python(make_rows(input, normalized_dims, kMaxDims)),
                                        to_python(make_rows_or_none(grad_residual, normalized_dims)), to_python(dx),
                                        grad_weight.defined(), contiguous(weight), weight_offset, problem.eps,
                                        problem.groups, problem.rows, problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }
};

struct AddRmsNormBackend : TritonBackend {
  static void launch(const Tensor& input, const Tensor& residual, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, const Tensor& output,
                     const Tensor& residual_out) {
    launch_forward(input, residual, normalized_dims, weight, eps, weight_offset, output, residual_out);
  }
};

struct GatedRmsNormBackend : TritonBackend {
  static void launch(const Tensor& input, const Tensor& gate, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, Gating gating, const Tensor& output) {
    const Problem problem = make_problem(input, normalized_dims, weight, eps);
    const Target y(output, normalized_dims, kMaxDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_gated_forward")(
          to_python(make_rows(input, normalized_dims, kMaxDims)), to_python(make_rows(gate, normalized_dims, kMaxDims)),
          to_python(y.rows()), contiguous(weight), weight_offset, problem.eps, to_python(gating.activation),
          gating.norm_before_gate, problem.groups, problem.rows, problem.cols);
    }
    y.finish();
  }

  // Gradients may be undefined: then they are not wanted.
  static void launch_backward(const Tensor& grad_output, const Tensor& input, const Tensor& gate,
                              size_t normalized_dims, const OptionalTensor& weight, std::optional<double> eps,
                              double weight_offset, Gating gating, const Tensor& grad_input, const Tensor& grad_gate,
                              const Tensor& grad_weight) {
    const Problem problem = make_problem(input, normalized_dims, weight, eps);
    std::optional<Target> dx, dgate;
    if (grad_input.defined()) dx.emplace(grad_input, normalized_dims, kMaxDims);
    if (grad_gate.defined()) dgate.emplace(grad_gate, normalized_dims, kMaxDims);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_gated_backward")(to_python(make_rows(grad_output, normalized_dims, kMaxDims)),
                                              to_python(make_rows(input, normalized_dims, kMaxDims)),
                                              to_python(make_rows(gate, normalized_dims, kMaxDims)), to_python(dx),
                                              to_python(dgate), grad_weight.defined(), contiguous(weight),
                                              weight_offset, problem.eps, to_python(gating.activation),
                                              gating.norm_before_gate, problem.groups, problem.rows, problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (dgate.has_value()) dgate->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }
};

}  // namespace

Registration register_triton(const std::string& dispatch_key) {
  return register_kernels("normops", c10::parseDispatchKey(dispatch_key), [](torch::Library& library) {
    RmsNormOperators<RmsNormBackend>::register_in(library);
    AddRmsNormOperators<AddRmsNormBackend>::register_in(library);
    GatedRmsNormOperators<GatedRmsNormBackend>::register_in(library);
  });
}

}  // namespace normops::python
