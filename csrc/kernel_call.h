// Converts the arguments of an operator to KernelArgs, for the launchers of all devices.
#pragma once
#include <list>

#include "operator.h"
#include "rms_norm_rope.h"
#include "tensor_rows.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// Returns whether the weight has a row for each row of the input. Kernels without groups read it as a gate.
inline bool has_all_rows(const Norm& norm, const Tensor& input) {
  return is_given(norm.weight) && norm.weight->numel() == input.numel() &&
         norm.weight->dim() > static_cast<int64_t>(norm.dims());
}

// The kernel arguments of a call. Owns the temporaries that it creates, and borrows the operator's arguments.
class Call : public KernelArgs {
 public:
  template <class Operator>
  Call(const Operator& arguments, const OutputPtrs<Operator>& outputs, int max_dims = RowLayout::kMaxDims,
       bool by_groups = true)
      : Call(arguments.input, norm_of(arguments), max_dims, by_groups) {
    if constexpr (requires { arguments.bias; }) modulate(arguments.norm, *outputs.back());
    const auto inputs = tensors_of(arguments);
    for (size_t i = 0; i < inputs.size(); i++) add_input(Operator::kTensors[i], *inputs[i]);
    if constexpr (requires { arguments.fill(*this); }) arguments.fill(*this);
    if constexpr (requires { arguments.rope; }) rotate(arguments.input, arguments.cos, arguments.sin, arguments.rope);
    for (size_t i = 0; i < outputs.size(); i++) add_output(Operator::kTensors[inputs.size() + i], *outputs[i]);
  }
  Call(const Call&) = delete;

  // Returns the tensor that kernels read or write; undefined if absent.
  const Tensor& tensor(TensorIndex index) const { return has(index) ? *rows_[index]->tensor : defined_if(false, {}); }

  // Copies temporaries back to their outputs.
  void finish() const;

 private:
  Call(const Tensor& input, const Norm& norm, int max_dims, bool by_groups);

  template <class Operator>
  static Norm norm_of(const Operator& arguments) {
    if constexpr (requires { arguments.norm; }) {
      return arguments.norm;
    } else {
      static const OptionalTensor none;
      return {arguments.normalized_shape, none, std::nullopt, 0.0, kRoundOnce};
    }
  }

  void modulate(const Norm& norm, const Tensor& last_output);
  void group_by(const Tensor& rows);

  void add_input(TensorIndex index, const Tensor& tensor);
  void add_weight(const Tensor& weight);
  void add_modulation(TensorIndex index, const Tensor& tensor);
  void add_output(TensorIndex index, const Tensor& target);
  size_t dims_of(TensorIndex index) const;
  bool is_permuted() const { return by_groups_ && !order_.empty(); }
  Tensor by_group(const Tensor& rows) const;
  void set(TensorIndex index, Rows rows);
  void rotate(const Tensor& input, const Tensor& cos, const Tensor& sin, const Rope& rope);

  const Tensor& input_;
  size_t normalized_dims_;
  int max_dims_;
  bool by_groups_;  // whether kernels require row r to be of group r % groups
  bool weight_has_all_rows_ = false;
  c10::DimVector order_;        // of the dimensions of rows, by group; empty if they already are
  std::list<Tensor> permuted_;  // views of outputs, with rows in this order
  std::optional<Rows> rows_[kTensorCount];
  const Tensor* targets_[kTensorCount] = {};
};

}  // namespace normops
#pragma GCC visibility pop
