// rms_norm and rms_norm_backward on CPU tensors: lays the problem out for the kernels and shares it among the threads.
#include "../rms_norm_backend.h"

#include <cmath>

#include "../overlap.h"
#include "launch.h"

namespace normops::cpu {
namespace {

void launch_rms_norm(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const Rows x = make_rows(input, normalized_dims);
  const Target y(output, normalized_dims);
  Scale scale(weight, weight_offset, dtype_of(input), problem);
  run_forward(rms_norm_kernels().forward, forward_args(problem, x, scale.data(), y), problem.rows);
  y.finish();
}

// grad_weight is summed, for each group of the weight, within chunks of rows and then over the chunks. Chunks of about
// sqrt(rows) keep both sums, hence the bound on their rounding error, shortest; and as they depend on the number of
// rows alone, so do the bits of the result.
int64_t grad_weight_chunk_rows(int64_t rows) {
  constexpr int64_t kMultiple = 4;  // the kernel's row group
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(rows))));
  return (root + kMultiple - 1) / kMultiple * kMultiple;
}

// Whether the partial of a single chunk can be formed in grad_weight itself: it is laid out in the same way, and is
// none of these inputs, which are read until the end.
bool is_partial_layout(const Tensor& grad_weight, DType dtype, int64_t cols,
                       std::initializer_list<const Tensor*> inputs) {
  return dtype_of(grad_weight) == dtype && compute_dtype(dtype) == dtype && grad_weight.is_contiguous() &&
         padded_cols(dtype, cols) == cols && std::all_of(inputs.begin(), inputs.end(), [&](const Tensor* input) {
           return overlap(grad_weight, *input) == Overlap::none;
         });
}

// grad_input and grad_weight may be undefined: then they are not wanted.
void launch_rms_norm_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                              const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                              const OptionalTensor& grad_residual, const Tensor& grad_input,
                              const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, weight, eps);
  const DType dtype = dtype_of(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims);
  Scale scale(weight, weight_offset, dtype, problem);
  RmsNormBackwardArgs args = {
      .dtype = dtype,
      .grad_output_dtype = dtype_of(grad_output),
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .grad_output = dy.tensor->const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor->const_data_ptr(),
      .input_rows = x.layout,
      .scale = scale.data(),
      .groups = problem.groups,
      .rows_per_chunk = grad_weight_chunk_rows(problem.rows / problem.groups),
      .stream = exceeds_caches(input, 3),
  };
  Rows residual;
  if (is_given(grad_residual)) {
    residual = make_rows(*grad_residual, normalized_dims);
    args.grad_residual = residual.tensor->const_data_ptr();
    args.grad_residual_rows = residual.layout;
  }
  std::optional<Target> dx;
  if (grad_input.defined()) {
    dx.emplace(grad_input, normalized_dims);
    args.grad_input = dx->data();
    args.grad_input_rows = dx->layout();
  }
  const int64_t chunks = chunk_count(problem.rows / problem.groups, args.rows_per_chunk);
  const bool is_partial =
      chunks == 1 && grad_weight.defined() &&
      is_partial_layout(grad_weight, dtype, problem.cols,
                        {&grad_output, &input, &value_or_undefined(weight), &value_or_undefined(grad_residual)});
  const int64_t partial_size = problem.groups * padded_cols(dtype, problem.cols);
  Scratch partials(dtype, grad_weight.defined() && !is_partial ? chunks * partial_size : 0);
  if (grad_weight.defined()) {
    args.grad_weight_partials = is_partial ? grad_weight.mutable_data_ptr() : partials.data();
  }

  const RmsNormBackwardKernels& kernels = rms_norm_backward_kernels();
  run_backward(kernels, args);
  if (dx.has_value()) dx->finish();

  if (grad_weight.defined() && !is_partial) {
    const bool is_in_place = grad_weight.is_contiguous();
    const Tensor dw = is_in_place ? grad_weight : CpuBackend::empty_contiguous(grad_weight);
    parallel_for_columns(problem.groups, problem.cols, grain(chunks), [&](int64_t group, int64_t begin, int64_t end) {
      kernels.grad_weight(dtype, dtype_of(dw), partials.data(), chunks, problem.groups, problem.cols,
                          dw.mutable_data_ptr(), group, begin, end);
    });
    if (!is_in_place) grad_weight.copy_(dw);
  }
}

struct Backend : CpuBackend {
  static constexpr auto launch = launch_rms_norm;
  static constexpr auto launch_backward = launch_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { RmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cpu
