// Operators that compute or take the statistics of rms_norm, for callers that reduce these themselves, for example over
// ranks with a shard of every row. The sums over the parts of a row add up to those over the row, which has row_size
// elements.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// The sum of squares of each row, or of each part of a row.
struct RmsNormStats {
  static constexpr const char *kName = "rms_norm_stats", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kSquareSum};

  const Tensor& input;
  c10::SymIntArrayRef normalized_shape;

  auto members() const { return std::tie(input, normalized_shape); }
  void check(const char* op) const { check_input(op, input, normalized_shape); }
  void fill(KernelArgs& args) const { args.sums = Sums::output; }
  Like<RmsNormStats> like() const { return {OutputSpec::numbers_of_rows(input, normalized_shape.size())}; }
};

// rms_norm of a part of each row, with the sum of squares of the whole row as input.
struct RmsNormFromStats {
  static constexpr const char *kName = "rms_norm_from_stats", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kSquareSum, kWeight, kOutput};

  const Tensor& input;
  const Tensor& square_sum;
  Norm norm;
  c10::SymInt row_size;

  auto members() const { return std::tie(input, square_sum, norm, row_size); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_numbers_of_rows(op, "square_sum", square_sum, input, norm.dims());
    check_row_size(op, row_size, norm.normalized_shape);
  }
  void fill(KernelArgs& args) const { args.size = row_size.expect_int(), args.sums = Sums::input; }
  Like<RmsNormFromStats> like() const { return {&input}; }
};

// The sums over each row, or its part, that rms_norm_backward needs: of squares, and of grad_output * weight * input.
struct RmsNormBackwardStats {
  static constexpr const char *kName = "rms_norm_backward_stats", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 2;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kWeight, kSquareSum, kDot};

  const Tensor& grad_output;
  const Tensor& input;
  Norm norm;

  auto members() const { return std::tie(grad_output, input, norm); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_input(op, "grad_output", grad_output, input);
  }
  void fill(KernelArgs& args) const { args.sums = Sums::output; }
  Like<RmsNormBackwardStats> like() const {
    const auto sums = OutputSpec::numbers_of_rows(input, norm.dims());
    return {sums, sums};
  }
};

// rms_norm_backward of a part of each row, with the sums over the whole row as inputs.
struct RmsNormBackwardFromStats {
  static constexpr const char *kName = "rms_norm_backward_from_stats", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 2;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput,        kSquareSum, kDot,
                                             kWeight,     kGradResidual, kGradInput, kGradWeight};

  const Tensor& grad_output;
  const Tensor& input;
  const Tensor& square_sum;
  const Tensor& dot;
  Norm norm;
  const OptionalTensor& grad_residual;
  std::array<bool, kOutputs> output_mask;
  c10::SymInt row_size;

  auto members() const {
    return std::tie(grad_output, input, square_sum, dot, norm, grad_residual, output_mask, row_size);
  }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_narrower_input(op, "grad_output", grad_output, input);
    check_numbers_of_rows(op, "square_sum", square_sum, input, norm.dims());
    check_numbers_of_rows(op, "dot", dot, input, norm.dims());
    check_row_size(op, row_size, norm.normalized_shape);
    if (is_given(grad_residual)) check_like_input(op, "grad_residual", *grad_residual, input);
  }
  void fill(KernelArgs& args) const { args.size = row_size.expect_int(), args.sums = Sums::input; }
  Like<RmsNormBackwardFromStats> like() const {
    return {&defined_if(output_mask[0], input), &defined_if(output_mask[1], value_or_undefined(norm.weight))};
  }
};

Tensor composite(const RmsNormStats& arguments);
Tensor composite(const RmsNormFromStats& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormBackwardStats& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormBackwardFromStats& arguments);

}  // namespace normops
#pragma GCC visibility pop
