// The operators with kernels in Triton: the same operator functions as those of the C++ backends, whose launchers are
// functions of the Python module normops.triton.
#include "../python/registration.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include "../backend.h"
#include "../operators.h"
#include "../tensor_args.h"

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

// Row r is r / (middle * inner), r / inner % middle and r % inner along the three dimensions. For those that are
// missing Triton makes code that does not divide.
struct Nesting {
  int64_t middle = 1, inner = 1, outer_stride, middle_stride = 0, inner_stride = 0;  // in elements

  Nesting(const RowLayout& layout, int64_t bytes) : outer_stride(layout.strides[0] / bytes) {
    const int last = layout.dims - 1;
    if (layout.dims > 1) inner = layout.sizes[last], inner_stride = layout.strides[last] / bytes;
    if (layout.dims > 2) middle = layout.sizes[1], middle_stride = layout.strides[1] / bytes;
  }
};

py::object to_python(const TensorArgs& args, TensorIndex index, bool is_nested) {
  const Tensor& tensor = args.tensor(index);
  if (!tensor.defined()) return py::none();
  if (index == kWeight) return py::cast(tensor);
  const Nesting rows(args[index].layout, tensor.element_size());
  if (is_nested) {
    return launchers().attr("NestedRows")(tensor, rows.middle, rows.inner, rows.outer_stride, rows.middle_stride,
                                          rows.inner_stride);
  }
  return launchers().attr("Rows")(tensor, rows.inner, rows.outer_stride, rows.inner_stride);
}

py::object to_python(const TensorArgs& args, const Rotation& rotation) {
  const Tensor &cos = args.tensor(kCos), &sin = args.tensor(kSin);
  const Nesting rows(args[kCos].layout, cos.element_size());
  return launchers().attr("Rotation")(cos, sin, rows.middle, rows.inner, rows.outer_stride, rows.middle_stride,
                                      rows.inner_stride, rotation.interleaved, rotation.angle_of_pair, rotation.offset,
                                      rotation.pairs);
}

const char* activation_name(Activation activation) { return activation == Activation::silu ? "silu" : "sigmoid"; }

template <class Operator>
concept OfChannels = requires(const Operator& arguments) { arguments.dim; };

py::object channels_to_python(const TensorArgs& args, TensorIndex index) {
  const Tensor& tensor = args.tensor(index);
  if (!tensor.defined()) return py::none();
  if (index == kWeight || index == kBias) return py::cast(tensor);
  return launchers().attr("Channels")(tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2));
}

struct TritonBackend {
  static bool supports(const RmsNorm&) { return true; }
  static bool supports(const RmsNormBackward& arguments) { return !arguments.uses_bias(); }  // ATen sums grad_output
  // One weight and one bias for all samples; no result is rounded before the last one.
  static bool supports(const OfChannels auto& arguments) {
    const auto is_of_channels = [](const OptionalTensor& parameter) {
      return !is_given(parameter) || parameter->dim() == 1;
    };
    const bool rounds =
        arguments.norm.rounding != kRoundOnce && c10::isReducedFloatingType(arguments.input.scalar_type());
    return !rounds && is_of_channels(arguments.norm.weight) && is_of_channels(arguments.bias);
  }
  using Guard = c10::DeviceGuard;
  static Tensor empty_contiguous(const OutputSpec& like) { return at::empty(like.sizes(), like.options()); }

  template <class Operator>
  static void launch(const Operator& arguments, const OutputPtrs<Operator>& outputs) {
    constexpr bool is_rotated = requires { arguments.rope; }, is_backward = Operator::kTensors[0] == kGradOutput;
    const TensorArgs args(arguments, outputs, {.max_dims = is_rotated ? kMaxNestedDims : kMaxDims});
    {
      const py::gil_scoped_acquire gil;
      py::dict named;
      const auto add = [&](TensorIndex index) { named[kTensorNames[index]] = to_python(args, index, is_rotated); };
      for (const TensorIndex index : Operator::kTensors) {
        if (index != kCos && index != kSin && index != kGradWeight && index != kBias && index != kGradBias) add(index);
      }
      if (args.has(kBias)) add(kBias);
      named["weight_offset"] = args.weight.offset;
      named["eps"] = args.eps;
      named["rounding"] = launchers().attr("Rounding")(args.rounding.normalized, args.rounding.multiplied);
      named["groups"] = args.weight.groups, named["rows"] = args.rows, named["cols"] = args.cols;
      if constexpr (requires { arguments.alpha; }) named["alpha"] = args.alpha;
      if constexpr (requires { arguments.row_size; }) named["size"] = args.size;
      if constexpr (is_rotated) named["rotation"] = to_python(args, args.rotation);
      if constexpr (requires { arguments.gating(); }) {
        named["activation"] = activation_name(args.gating.activation);
        named["norm_before_gate"] = args.gating.norm_before_gate;
      }
      if constexpr (is_backward) named["wants_weight"] = args.has(kGradWeight);
      const char* const launcher = is_rotated    ? is_backward ? "launch_rope_backward" : "launch_rope_forward"
                                   : is_backward ? "launch_backward"
                                                 : "launch_forward";
      const auto dw = launchers().attr(launcher)(**named).cast<OptionalTensor>();
      if (const Tensor& grad_weight = args.tensor(kGradWeight); grad_weight.defined()) {
        grad_weight.copy_(dw->view(grad_weight.sizes()));
      }
    }
    args.finish();
  }

  template <OfChannels Operator>
  static void launch(const Operator& arguments, const OutputPtrs<Operator>& outputs) {
    constexpr bool is_backward = Operator::kTensors[0] == kGradOutput;
    const TensorArgs args(arguments, outputs, {.contiguous_positions = false});
    {
      const py::gil_scoped_acquire gil;
      py::dict named;
      for (const TensorIndex index : Operator::kTensors) {
        if (index != kGradWeight && index != kGradBias) named[kTensorNames[index]] = channels_to_python(args, index);
      }
      named["weight_offset"] = args.weight.offset;
      named["eps"] = args.eps;
      named["activation"] = py::none();
      if (args.channels.is_activated) named["activation"] = activation_name(args.gating.activation);
      if constexpr (is_backward)
        named["wants_weight"] = args.has(kGradWeight), named["wants_bias"] = args.has(kGradBias);
      const auto sums = launchers().attr(is_backward ? "launch_channel_backward" : "launch_channel_forward")(**named);
      for (const TensorIndex index : {kGradWeight, kGradBias}) {
        if (args.has(index)) args.tensor(index).copy_(sums[py::int_(index - kGradWeight)].template cast<Tensor>());
      }
    }
    args.finish();
  }
};

}  // namespace

namespace {

template <class List>
python::Registration register_list(const std::string& dispatch_key) {
  return python::register_kernels("normops", c10::parseDispatchKey(dispatch_key), [](torch::Library& library) {
    register_all<BackendKernels<TritonBackend>>(library, List());
  });
}

}  // namespace

python::Registration register_operators(const std::string& key) { return register_list<Operators>(key); }
python::Registration register_channel_operators(const std::string& key) { return register_list<ChannelOperators>(key); }

}  // namespace normops::triton
