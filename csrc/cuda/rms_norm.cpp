// rms_norm and rms_norm_backward on CUDA tensors: lays the problem out for the kernels and launches them on the current
// stream, through torch's device-neutral interface: this file builds against any build of torch.
#include "../rms_norm.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../problem.h"
#include "rms_norm_launch.h"

namespace normops::cuda {
namespace {

Stream current_stream(const Tensor& tensor) {
  const c10::Device device = tensor.device();
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

Tensor empty_contiguous(const Tensor& like) { return at::empty_like(like, at::MemoryFormat::Contiguous); }

// The tensor keeps the memory until the kernel is launched; after that the stream's order does.
Weight make_weight(const Tensor& contiguous, double weight_offset) {
  if (!contiguous.defined()) return {nullptr, DType::float32, 0.0};
  return {contiguous.const_data_ptr(), dtype_of(contiguous), weight_offset};
}

Tensor contiguous_or_undefined(const OptionalTensor& weight) {
  return is_given(weight) ? weight->contiguous() : Tensor();
}

void run_rms_norm(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight, std::optional<double> eps,
                  double weight_offset, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, eps);
  if (problem.rows == 0 || problem.cols == 0) return;
  const Rows x = make_rows(input, normalized_dims);
  const Target y(output, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  const RmsNormArgs args = {
      .dtype = dtype_of(input),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = make_weight(w, weight_offset),
      .input = x.tensor.const_data_ptr(),
      .input_rows = x.layout,
      .output = y.data(),
      .output_rows = y.layout(),
  };
  launch_rms_norm(args, current_device(), current_stream(input));
  y.finish();
}

// grad_input and grad_weight may be undefined: then they are not wanted.
void run_rms_norm_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                           const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                           const OptionalTensor& grad_residual, const Tensor& grad_input, const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, eps);
  if (problem.rows == 0 || problem.cols == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    return;
  }
  const DType dtype = dtype_of(input);
  const Device device = current_device();
  const Stream stream = current_stream(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims);
  const Tensor w = contiguous_or_undefined(weight);
  RmsNormBackwardArgs args = {
      .dtype = dtype,
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .weight = make_weight(w, weight_offset),
      .grad_output = dy.tensor.const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor.const_data_ptr(),
      .input_rows = x.layout,
  };
  Rows residual;
  if (is_given(grad_residual)) {
    residual = make_rows(*grad_residual, normalized_dims);
    args.grad_residual = residual.tensor.const_data_ptr();
    args.grad_residual_rows = residual.layout;
  }
  std::optional<Target> dx;
  if (grad_input.defined()) {
    dx.emplace(grad_input, normalized_dims);
    args.grad_input = dx->data();
    args.grad_input_rows = dx->layout();
  }
  const int64_t count = rms_norm_backward_partials(dtype, problem.rows, problem.cols, device);
  Tensor partials;
  if (grad_weight.defined()) {
    const auto compute = compute_dtype(dtype) == DType::float64 ? at::kDouble : at::kFloat;
    partials = at::empty({count, problem.cols}, input.options().dtype(compute));
    args.grad_weight_partials = partials.mutable_data_ptr();
  }
  launch_rms_norm_backward(args, device, stream);
  if (dx.has_value()) dx->finish();
  if (grad_weight.defined()) {
    const Tensor dw = grad_weight.is_contiguous() ? grad_weight : empty_contiguous(grad_weight);
    launch_grad_weight(dtype, dtype_of(dw), partials.const_data_ptr(), count, problem.cols, dw.mutable_data_ptr(),
                       stream);
    if (!dw.is_same(grad_weight)) grad_weight.copy_(dw);
  }
}

Tensor rms_norm_cuda(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset) {
  check_rms_norm(input, normalized_shape, weight, eps);
  const c10::DeviceGuard guard(input.device());
  Tensor output = empty_contiguous(input);
  run_rms_norm(input, normalized_shape.size(), weight, eps, weight_offset, output);
  return output;
}

Tensor& rms_norm_out_cuda(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                          std::optional<double> eps, double weight_offset, Tensor& out) {
  check_rms_norm_out(input, normalized_shape, weight, eps, out);
  const c10::DeviceGuard guard(input.device());
  run_rms_norm(input, normalized_shape.size(), weight, eps, weight_offset, out);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_backward_cuda(const Tensor& grad_output, const Tensor& input,
                                                  c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                  std::optional<double> eps, double weight_offset,
                                                  const OptionalTensor& grad_residual, OutputMask output_mask) {
  check_rms_norm_backward(grad_output, input, normalized_shape, weight, eps, grad_residual);
  const c10::DeviceGuard guard(input.device());
  Tensor grad_input, grad_weight;
  if (output_mask[0]) grad_input = empty_contiguous(input);
  if (output_mask[1] && is_given(weight)) grad_weight = empty_contiguous(*weight);
  run_rms_norm_backward(grad_output, input, normalized_shape.size(), weight, eps, weight_offset, grad_residual,
                        grad_input, grad_weight);
  return {grad_input, grad_weight};
}

std::tuple<Tensor&, Tensor&> rms_norm_backward_out_cuda(const Tensor& grad_output, const Tensor& input,
                                                        c10::SymIntArrayRef normalized_shape,
                                                        const OptionalTensor& weight, std::optional<double> eps,
                                                        double weight_offset, const OptionalTensor& grad_residual,
                                                        OutputMask output_mask, Tensor& grad_input,
                                                        Tensor& grad_weight) {
  check_rms_norm_backward_out(grad_output, input, normalized_shape, weight, eps, grad_residual, output_mask, grad_input,
                              grad_weight);
  const c10::DeviceGuard guard(input.device());
  const bool wants_weight = output_mask[1] && is_given(weight);
  run_rms_norm_backward(grad_output, input, normalized_shape.size(), weight, eps, weight_offset, grad_residual,
                        output_mask[0] ? grad_input : Tensor(), wants_weight ? grad_weight : Tensor());
  return {grad_input, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(normops, CUDA, m) {
  m.impl("rms_norm", rms_norm_cuda);
  m.impl("rms_norm.out", rms_norm_out_cuda);
  m.impl("rms_norm_backward", rms_norm_backward_cuda);
  m.impl("rms_norm_backward.out", rms_norm_backward_out_cuda);
}

}  // namespace normops::cuda
