// rms_norm and rms_norm_backward on CPU tensors: lays the problem out for the kernels and shares it among the threads.
#include "../rms_norm_backend.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_native.h>
#include <c10/util/SmallBuffer.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../overlap.h"
#include "../problem.h"
#include "rms_norm_kernel.h"

namespace normops::cpu {
namespace {

// Elements a thread should at least have: waking a second one costs about as much as a thread needs for these.
constexpr int64_t kGrainElements = 16384;

int64_t grain(int64_t elements_each) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_each));
}

Tensor empty_contiguous(const Tensor& like) { return at::native::empty_cpu(like.sizes(), like.scalar_type()); }

// Uninitialised memory for `count` numbers of the compute type; small amounts lie on the stack.
class Scratch {
 public:
  Scratch(DType dtype, int64_t count) : buffer_(compute_dtype(dtype) == DType::float64 ? count : (count + 1) / 2) {}
  Scratch(const Scratch&) = delete;
  void* data() { return buffer_.data(); }

 private:
  c10::SmallBuffer<double, 2048> buffer_;
};

// Shares a vector over the columns among the threads, in whole blocks.
template <class Function>
void parallel_for_columns(int64_t cols, int64_t grain_columns, const Function& function) {
  constexpr int64_t kBlock = 16;
  at::parallel_for(0, padded_cols(cols) / kBlock, std::max<int64_t>(1, grain_columns / kBlock),
                   [&](int64_t begin, int64_t end) { function(begin * kBlock, std::min(end * kBlock, cols)); });
}

// weight + weight_offset as the kernels read it, or ones without a weight.
class Scale {
 public:
  Scale(const OptionalTensor& weight, double weight_offset, DType dtype, int64_t cols)
      : weight_(is_given(weight) ? weight->contiguous() : Tensor()),
        is_weight_itself_(weight_.defined() && weight_offset == 0 && dtype_of(weight_) == dtype &&
                          compute_dtype(dtype) == dtype && padded_cols(cols) == cols),
        converted_(dtype, is_weight_itself_ ? 0 : padded_cols(cols)) {
    if (is_weight_itself_) return;
    void* const target = converted_.data();
    if (weight_.defined()) {
      parallel_for_columns(cols, kGrainElements, [&](int64_t begin, int64_t end) {
        rms_norm_kernels().scale(dtype, dtype_of(weight_), weight_.const_data_ptr(), weight_offset, target, begin, end);
      });
    } else if (compute_dtype(dtype) == DType::float64) {
      std::fill_n(static_cast<double*>(target), padded_cols(cols), 1.0);
    } else {
      std::fill_n(static_cast<float*>(target), padded_cols(cols), 1.0f);
    }
  }

  const void* data() { return is_weight_itself_ ? weight_.const_data_ptr() : converted_.data(); }

 private:
  Tensor weight_;
  bool is_weight_itself_;
  Scratch converted_;
};

// Whether threads share each row: there are fewer rows than threads, and a row is long enough to be worth it.
bool shares_rows(const Problem& problem) {
  return problem.cols >= 2 * kGrainElements && problem.rows < at::get_num_threads();
}

// Sums over the spans of a row, one after another as a kernel that has the row to itself adds them.
class SpanSums {
 public:
  explicit SpanSums(int64_t cols) : count_((cols + kSpan - 1) / kSpan), sums_(DType::float64, count_) {}
  double* data() { return static_cast<double*>(sums_.data()); }
  int64_t count() const { return count_; }
  double total() { return std::accumulate(data(), data() + count_, 0.0); }

 private:
  int64_t count_;
  Scratch sums_;
};

void forward_shared_rows(const RmsNormArgs& args, int64_t rows) {
  SpanSums squares(args.cols);
  for (int64_t row = 0; row < rows; row++) {
    at::parallel_for(0, squares.count(), kGrainElements / kSpan, [&](int64_t begin, int64_t end) {
      rms_norm_kernels().forward_sums(args, row, begin, end, squares.data());
    });
    const double square_sum = squares.total();
    parallel_for_columns(args.cols, kGrainElements, [&](int64_t begin, int64_t end) {
      rms_norm_kernels().forward_columns(args, row, square_sum, begin, end);
    });
  }
}

void backward_shared_rows(const RmsNormBackwardArgs& args) {
  SpanSums squares(args.cols), dots(args.cols);
  for (int64_t row = 0; row < args.rows; row++) {
    at::parallel_for(0, squares.count(), kGrainElements / kSpan, [&](int64_t begin, int64_t end) {
      rms_norm_kernels().backward_sums(args, row, begin, end, squares.data(), dots.data());
    });
    const double square_sum = squares.total(), dot = args.grad_input != nullptr ? dots.total() : 0;
    parallel_for_columns(args.cols, kGrainElements, [&](int64_t begin, int64_t end) {
      rms_norm_kernels().backward_columns(args, row, square_sum, dot, begin, end);
    });
  }
}

void launch_rms_norm(const Tensor& input, size_t normalized_dims, const OptionalTensor& weight,
                     std::optional<double> eps, double weight_offset, const Tensor& output) {
  const Problem problem = make_problem(input, normalized_dims, eps);
  if (problem.rows == 0 || problem.cols == 0) return;
  const DType dtype = dtype_of(input);
  const Rows x = make_rows(input, normalized_dims);
  const Target y(output, normalized_dims);
  Scale scale(weight, weight_offset, dtype, problem.cols);
  const RmsNormArgs args = {
      .dtype = dtype,
      .cols = problem.cols,
      .eps = problem.eps,
      .input = x.tensor.const_data_ptr(),
      .input_rows = x.layout,
      .scale = scale.data(),
      .output = y.data(),
      .output_rows = y.layout(),
  };
  if (shares_rows(problem)) {
    forward_shared_rows(args, problem.rows);
  } else {
    at::parallel_for(0, problem.rows, grain(problem.cols),
                     [&](int64_t begin, int64_t end) { rms_norm_kernels().forward(args, begin, end); });
  }
  y.finish();
}

// grad_weight is summed within chunks of rows and then over the chunks. Chunks of about sqrt(rows) keep both sums,
// hence the bound on their rounding error, shortest; and as they depend on the number of rows alone, so do the bits of
// the result.
int64_t grad_weight_chunk_rows(int64_t rows) {
  constexpr int64_t kMultiple = 4;  // the kernel's row group
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(rows))));
  return (root + kMultiple - 1) / kMultiple * kMultiple;
}

// Whether the partial of a single chunk can be formed in grad_weight itself: it is laid out in the same way, and is
// none of these inputs, which are read until the end.
bool is_partial_layout(const Tensor& grad_weight, DType dtype, int64_t cols, std::initializer_list<Tensor> inputs) {
  return dtype_of(grad_weight) == dtype && compute_dtype(dtype) == dtype && grad_weight.is_contiguous() &&
         padded_cols(cols) == cols && std::all_of(inputs.begin(), inputs.end(), [&](const Tensor& input) {
           return overlap(grad_weight, input) == Overlap::none;
         });
}

// grad_input and grad_weight may be undefined: then they are not wanted.
void launch_rms_norm_backward(const Tensor& grad_output, const Tensor& input, size_t normalized_dims,
                              const OptionalTensor& weight, std::optional<double> eps, double weight_offset,
                              const OptionalTensor& grad_residual, const Tensor& grad_input,
                              const Tensor& grad_weight) {
  const Problem problem = make_problem(input, normalized_dims, eps);
  if (problem.rows == 0 || problem.cols == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    return;
  }
  const DType dtype = dtype_of(input);
  const Rows dy = make_rows(grad_output, normalized_dims);
  const Rows x = make_rows(input, normalized_dims);
  Scale scale(weight, weight_offset, dtype, problem.cols);
  RmsNormBackwardArgs args = {
      .dtype = dtype,
      .rows = problem.rows,
      .cols = problem.cols,
      .eps = problem.eps,
      .grad_output = dy.tensor.const_data_ptr(),
      .grad_output_rows = dy.layout,
      .input = x.tensor.const_data_ptr(),
      .input_rows = x.layout,
      .scale = scale.data(),
      .rows_per_chunk = grad_weight_chunk_rows(problem.rows),
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
  const int64_t chunks = (problem.rows + args.rows_per_chunk - 1) / args.rows_per_chunk;
  const bool is_partial =
      chunks == 1 && grad_weight.defined() &&
      is_partial_layout(grad_weight, dtype, problem.cols,
                        {grad_output, input, value_or_undefined(weight), value_or_undefined(grad_residual)});
  Scratch partials(dtype, grad_weight.defined() && !is_partial ? chunks * padded_cols(problem.cols) : 0);
  if (grad_weight.defined()) {
    args.grad_weight_partials = is_partial ? grad_weight.mutable_data_ptr() : partials.data();
  }

  if (shares_rows(problem)) {
    backward_shared_rows(args);
  } else {
    at::parallel_for(0, chunks, grain(args.rows_per_chunk * problem.cols),
                     [&](int64_t begin, int64_t end) { rms_norm_kernels().backward(args, begin, end); });
  }
  if (dx.has_value()) dx->finish();

  if (grad_weight.defined() && !is_partial) {
    const bool is_in_place = grad_weight.is_contiguous();
    const Tensor dw = is_in_place ? grad_weight : empty_contiguous(grad_weight);
    parallel_for_columns(problem.cols, grain(chunks), [&](int64_t begin, int64_t end) {
      rms_norm_kernels().grad_weight(dtype, dtype_of(dw), partials.data(), chunks, problem.cols, dw.mutable_data_ptr(),
                                     begin, end);
    });
    if (!is_in_place) grad_weight.copy_(dw);
  }
}

struct Backend {
  struct Guard {
    explicit Guard(c10::Device) {}
  };
  static constexpr auto empty_contiguous = cpu::empty_contiguous;
  static constexpr auto launch = launch_rms_norm;
  static constexpr auto launch_backward = launch_rms_norm_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, CPU, m) { RmsNormOperators<Backend>::register_in(m); }

}  // namespace normops::cpu
