// The operators with kernels in Triton: the same operator functions as those of the C++ backends, whose launchers are
// functions of the Python module normops.triton.
#include "binding.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include "../backend.h"
#include "../launch.h"
#include "../operators.h"
#include "../problem.h"

namespace normops::triton {
namespace {

namespace py = pybind11;

constexpr int kMaxDims = 2;        // that the kernels tell rows apart by
constexpr int kMaxNestedDims = 3;  // and, where rows are rotated, those of samples, tokens and heads, in any order

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

// Row r is r / (middle * inner), r / inner % middle and r % inner along the three dimensions. For those that are
// missing Triton makes code that does not divide.
struct Nesting {
  int64_t middle = 1, inner = 1, outer_stride, middle_stride = 0, inner_stride = 0;

  explicit Nesting(const RowLayout& layout) : outer_stride(layout.strides[0]) {
    const int last = layout.dims - 1;
    if (layout.dims > 1) inner = layout.sizes[last], inner_stride = layout.strides[last];
    if (layout.dims > 2) middle = layout.sizes[1], middle_stride = layout.strides[1];
  }
};

py::object to_python_nested(const Rows& rows) {
  const Nesting nesting(rows.layout);
  return launchers().attr("NestedRows")(*rows.tensor, nesting.middle, nesting.inner, nesting.outer_stride,
                                        nesting.middle_stride, nesting.inner_stride);
}

py::object to_python(const Tables& tables, const Rope& rope) {
  const Rotation rotation = make_rotation(tables, rope);
  const Nesting nesting(rotation.rows);
  return launchers().attr("Rotation")(tables.cos(), tables.sin(), nesting.middle, nesting.inner, nesting.outer_stride,
                                      nesting.middle_stride, nesting.inner_stride, rotation.interleaved,
                                      rotation.angle_of_pair, rotation.offset, rotation.pairs);
}

py::object to_python(Casting casting) { return launchers().attr("Casting")(casting.normalized, casting.multiplied); }

const char* to_python(Activation activation) { return activation == Activation::silu ? "silu" : "sigmoid"; }

Rows make_rows_or_none(const OptionalTensor& tensor, size_t normalized_dims) {
  return is_given(tensor) ? make_rows(*tensor, normalized_dims, kMaxDims) : Rows();
}

OptionalTensor contiguous(const OptionalTensor& weight) {
  return is_given(weight) ? OptionalTensor(weight->contiguous()) : std::nullopt;
}

void launch_forward(const Tensor& input, const OptionalTensor& residual, const Norm& norm, double alpha,
                    const Tensor& output, const OptionalTensor& residual_out) {
  const Problem problem = make_problem(input, norm);
  const Target y(output, norm.dims(), kMaxDims);
  std::optional<Target> h;
  if (is_given(residual_out)) h.emplace(*residual_out, norm.dims(), kMaxDims);
  {
    py::gil_scoped_acquire gil;
    launchers().attr("launch_forward")(to_python(make_rows(input, norm.dims(), kMaxDims)),
                                       to_python(make_rows_or_none(residual, norm.dims())), to_python(y.rows()),
                                       to_python(h), contiguous(norm.weight), norm.weight_offset, problem.eps,
                                       to_python(problem.casting), alpha, problem.groups, problem.rows, problem.cols);
  }
  y.finish();
  if (h.has_value()) h->finish();
}

struct TritonBackend {
  using Guard = c10::DeviceGuard;
  static Tensor empty_contiguous(const OutputLike& like) { return at::empty(like.sizes(), like.options()); }

  static void launch(const RmsNorm& arguments, const Tensor& output) {
    launch_forward(arguments.input, std::nullopt, arguments.norm, 1.0, output, std::nullopt);
  }

  static void launch(const AddRmsNorm& arguments, const Tensor& output, const Tensor& residual_out) {
    launch_forward(arguments.input, arguments.residual, arguments.norm, arguments.alpha, output, residual_out);
  }

  static void launch(const RmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const auto dx = target(grad_input, norm);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_backward")(to_python(make_rows(grad_output, norm.dims(), kMaxDims)),
                                        to_python(make_rows(input, norm.dims(), kMaxDims)),
                                        to_python(make_rows_or_none(grad_residual, norm.dims())), to_python(dx),
                                        grad_weight.defined(), contiguous(norm.weight), norm.weight_offset, problem.eps,
                                        to_python(problem.casting), problem.groups, problem.rows, problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }

  static void launch(const RmsNormStats& arguments, const Tensor& output) {
    const auto& [input, normalized_shape] = arguments;
    const size_t dims = normalized_shape.size();
    const int64_t cols = c10::multiply_integers(input.sizes().slice(input.dim() - dims));
    const Target square_sum(output, 0, kMaxDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_stats")(to_python(make_rows(input, dims, kMaxDims)), to_python(square_sum.rows()),
                                       input.numel() / cols, cols);
    }
    square_sum.finish();
  }

  static void launch(const RmsNormFromStats& arguments, const Tensor& output) {
    const auto& [input, square_sum, size, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Target y(output, norm.dims(), kMaxDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_from_stats")(
          to_python(make_rows(input, norm.dims(), kMaxDims)), to_python(make_rows(square_sum, 0, kMaxDims)),
          size.expect_int(), to_python(y.rows()), contiguous(norm.weight), norm.weight_offset, problem.eps,
          to_python(problem.casting), problem.groups, problem.rows, problem.cols);
    }
    y.finish();
  }

  static void launch(const RmsNormBackwardStats& arguments, const Tensor& square_sum, const Tensor& dot) {
    const auto& [grad_output, input, norm] = arguments;
    const Problem problem = make_problem(input, norm);
    const Target squares(square_sum, 0, kMaxDims), dots(dot, 0, kMaxDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_backward_stats")(
          to_python(make_rows(grad_output, norm.dims(), kMaxDims)), to_python(make_rows(input, norm.dims(), kMaxDims)),
          to_python(squares.rows()), to_python(dots.rows()), contiguous(norm.weight), norm.weight_offset,
          to_python(problem.casting), problem.groups, problem.rows, problem.cols);
    }
    squares.finish();
    dots.finish();
  }

  static void launch(const RmsNormBackwardFromStats& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, square_sum, dot, size, norm, grad_residual, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const auto dx = target(grad_input, norm);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_backward_from_stats")(
                   to_python(make_rows(grad_output, norm.dims(), kMaxDims)),
                   to_python(make_rows(input, norm.dims(), kMaxDims)), to_python(make_rows(square_sum, 0, kMaxDims)),
                   to_python(make_rows(dot, 0, kMaxDims)), size.expect_int(),
                   to_python(make_rows_or_none(grad_residual, norm.dims())), to_python(dx), grad_weight.defined(),
                   contiguous(norm.weight), norm.weight_offset, problem.eps, to_python(problem.casting), problem.groups,
                   problem.rows, problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }

  static void launch(const GatedRmsNorm& arguments, const Tensor& output) {
    const auto& [input, gate, norm, activation, norm_before_gate] = arguments;
    const Problem problem = make_problem(input, norm);
    const Target y(output, norm.dims(), kMaxDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_gated_forward")(
          to_python(make_rows(input, norm.dims(), kMaxDims)), to_python(make_rows(gate, norm.dims(), kMaxDims)),
          to_python(y.rows()), contiguous(norm.weight), norm.weight_offset, problem.eps, to_python(problem.casting),
          to_python(arguments.gating().activation), norm_before_gate, problem.groups, problem.rows, problem.cols);
    }
    y.finish();
  }

  static void launch(const GatedRmsNormBackward& arguments, const Tensor& grad_input, const Tensor& grad_gate,
                     const Tensor& grad_weight) {
    const auto& [grad_output, input, gate, norm, activation, norm_before_gate, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const auto dx = target(grad_input, norm), dgate = target(grad_gate, norm);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_gated_backward")(to_python(make_rows(grad_output, norm.dims(), kMaxDims)),
                                              to_python(make_rows(input, norm.dims(), kMaxDims)),
                                              to_python(make_rows(gate, norm.dims(), kMaxDims)), to_python(dx),
                                              to_python(dgate), grad_weight.defined(), contiguous(norm.weight),
                                              norm.weight_offset, problem.eps, to_python(problem.casting),
                                              to_python(arguments.gating().activation), norm_before_gate,
                                              problem.groups, problem.rows, problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (dgate.has_value()) dgate->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }

  static void launch(const RmsNormRope& arguments, const Tensor& output) {
    const auto& [input, cos, sin, norm, rope] = arguments;
    const Problem problem = make_problem(input, norm);
    const Target y(output, norm.dims(), kMaxNestedDims);
    {
      py::gil_scoped_acquire gil;
      launchers().attr("launch_rope_forward")(
          to_python_nested(make_rows(input, norm.dims(), kMaxNestedDims)),
          to_python(Tables(input, cos, sin, kMaxNestedDims), rope), to_python_nested(y.rows()), contiguous(norm.weight),
          norm.weight_offset, problem.eps, to_python(problem.casting), problem.groups, problem.rows, problem.cols);
    }
    y.finish();
  }

  static void launch(const RmsNormRopeBackward& arguments, const Tensor& grad_input, const Tensor& grad_weight) {
    const auto& [grad_output, input, cos, sin, norm, rope, output_mask] = arguments;
    const Problem problem = make_problem(input, norm);
    const auto dx = target(grad_input, norm, kMaxNestedDims);
    OptionalTensor dw;
    {
      py::gil_scoped_acquire gil;
      dw = launchers()
               .attr("launch_rope_backward")(to_python_nested(make_rows(grad_output, norm.dims(), kMaxNestedDims)),
                                             to_python_nested(make_rows(input, norm.dims(), kMaxNestedDims)),
                                             to_python(Tables(input, cos, sin, kMaxNestedDims), rope),
                                             dx.has_value() ? to_python_nested(dx->rows()) : py::object(py::none()),
                                             grad_weight.defined(), contiguous(norm.weight), norm.weight_offset,
                                             problem.eps, to_python(problem.casting), problem.groups, problem.rows,
                                             problem.cols)
               .cast<OptionalTensor>();
    }
    if (dx.has_value()) dx->finish();
    if (grad_weight.defined()) grad_weight.copy_(dw->view(grad_weight.sizes()));
  }

 private:
  static std::optional<Target> target(const Tensor& gradient, const Norm& norm, int max_dims = kMaxDims) {
    std::optional<Target> target;
    if (gradient.defined()) target.emplace(gradient, norm.dims(), max_dims);
    return target;
  }
};

}  // namespace

python::Registration register_operators(const std::string& dispatch_key) {
  return python::register_kernels("normops", c10::parseDispatchKey(dispatch_key), [](torch::Library& library) {
    register_all<BackendKernels<TritonBackend>>(library, Operators());
  });
}

}  // namespace normops::triton
