// How the launchers of every device lay out a call of an operator for its kernels.
#pragma once
#include <list>

#include "operator.h"
#include "problem.h"
#include "rms_norm_rope.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// A call as kernels take it. Keeps the memory of its tensors; the operator's arguments are lent.
class Call : public KernelArgs {
 public:
  template <class Operator>
  Call(const Operator& arguments, const Written<Operator>& outputs, int max_dims = RowLayout::kMaxDims)
      : Call(arguments.input, norm_of(arguments), max_dims) {
    const auto inputs = tensors_of(arguments);
    for (size_t i = 0; i < inputs.size(); i++) add(Operator::kTensors[i], *inputs[i], make_rows);
    if constexpr (requires { arguments.alpha; }) alpha = arguments.alpha;
    if constexpr (requires { arguments.gating(); }) gating = arguments.gating();
    if constexpr (requires { arguments.rope; }) rotate(arguments.input, arguments.cos, arguments.sin, arguments.rope);
    if constexpr (requires { arguments.size; }) {
      size = arguments.size.expect_int();
      sums = Sums::given;
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      const TensorIndex index = Operator::kTensors[inputs.size() + i];
      targets_[index] = &add(index, *outputs[i], make_target);
      if (index == kSquareSum) sums = Sums::wanted;
    }
  }
  Call(const Call&) = delete;

  // The tensor that is read or written; undefined without.
  const Tensor& tensor(TensorIndex index) const { return has(index) ? *rows_[index]->tensor : if_wanted(false, {}); }

  // Moves over what was written to memory other than an output's own.
  void finish() const;

 private:
  Call(const Tensor& input, const Norm& norm, int max_dims);

  template <class Operator>
  static Norm norm_of(const Operator& arguments) {
    if constexpr (requires { arguments.norm; }) {
      return arguments.norm;
    } else {
      static const OptionalTensor none;
      return {arguments.normalized_shape, none, std::nullopt, 0.0, kNoCasting};
    }
  }

  using Make = Rows(const Tensor& tensor, size_t normalized_dims, int max_dims);
  const Tensor& add(TensorIndex index, const Tensor& tensor, Make make);
  Tensor by_group(const Tensor& rows) const;
  void set(TensorIndex index, Rows rows);
  void rotate(const Tensor& input, const Tensor& cos, const Tensor& sin, const Rope& rope);

  size_t normalized_dims_;
  int max_dims_;
  c10::DimVector order_;
  std::list<Tensor> ordered_;
  std::optional<Rows> rows_[kTensorCount];
  const Tensor* targets_[kTensorCount] = {};
};

}  // namespace normops
#pragma GCC visibility pop
