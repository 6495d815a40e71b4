// The operator add_rms_norm normalizes residual + alpha * input. Its backward is rms_norm_backward, with this sum as
// input and the gradient of residual_out as grad_residual.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

struct AddRmsNorm {
  static constexpr const char *kName = "add_rms_norm", *kInplaceName = "add_rms_norm_";
  static constexpr size_t kOutputs = 2;
  static constexpr TensorIndex kTensors[] = {kInput, kResidual, kWeight, kOutput, kResidualOut};

  const Tensor& input;
  const Tensor& residual;
  Norm norm;
  double alpha;

  auto members() const { return std::tie(input, residual, norm, alpha); }
  void fill(KernelArgs& args) const { args.alpha = alpha; }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_wider_input(op, "residual", residual, input);
  }
  Like<AddRmsNorm> like() const { return {&input, &residual}; }
  // residual_out is written before the weight is read.
  void check_target(const char* op, size_t output, const Named& target) const {
    if (output == 1) check_disjoint(op, target, {"weight", &value_or_undefined(norm.weight)});
  }
};

std::tuple<Tensor, Tensor> composite(const AddRmsNorm& arguments);

}  // namespace normops
#pragma GCC visibility pop
