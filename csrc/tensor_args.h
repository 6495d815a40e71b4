// Converts the arguments of an operator to KernelArgs, for the launchers of all devices.
#pragma once
#include <list>

#include "channels.h"
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

// The requirements of a backend's kernels.
struct Requirements {
  int max_dims = RowLayout::kMaxDims;  // of a layout
  bool by_groups = true;               // row r is of group r % groups
  bool contiguous_positions = true;    // of a channel
};

// The kernel arguments of a call. Owns the temporaries that it creates, and borrows the operator's arguments.
class TensorArgs : public KernelArgs {
 public:
  template <class Operator>
  TensorArgs(const Operator& arguments, const OutputPtrs<Operator>& outputs, const Requirements& requirements = {})
      : TensorArgs(arguments.input, norm_of(arguments), dim_of(arguments), requirements) {
    if constexpr (requires { arguments.dim; }) {
      set_channels(arguments.activation);
    } else if constexpr (requires { arguments.bias; }) {
      modulate(arguments.norm, *outputs.back());
    }
    const auto inputs = tensors_of(arguments);
    for (size_t i = 0; i < inputs.size(); i++) add_input(Operator::kTensors[i], *inputs[i]);
    if constexpr (requires { arguments.fill(*this); }) arguments.fill(*this);
    if constexpr (requires { arguments.rope; }) rotate(arguments.input, arguments.cos, arguments.sin, arguments.rope);
    for (size_t i = 0; i < outputs.size(); i++) add_output(Operator::kTensors[inputs.size() + i], *outputs[i]);
  }
  TensorArgs(const TensorArgs&) = delete;

  Channels channels = {};  // of the channel operators

  // Returns the tensor that kernels read or write, [samples, channels, positions] for channels; undefined if absent.
  const Tensor& tensor(TensorIndex index) const { return has(index) ? *rows_[index]->tensor : kUndefined; }

  // Copies temporaries back to their outputs.
  void finish() const;

 private:
  TensorArgs(const Tensor& input, const Norm& norm, int64_t dim, const Requirements& requirements);

  // Returns the normalized dimension of a channel operator, counted from the end, or 0 for an operator on rows.
  template <class Operator>
  static int64_t dim_of(const Operator& arguments) {
    if constexpr (requires { arguments.dim; }) return arguments.dim;
    return 0;
  }

  template <class Operator>
  static Norm norm_of(const Operator& arguments) {
    if constexpr (requires { arguments.norm; }) {
      return arguments.norm;
    } else {
      return {arguments.normalized_shape, kNoTensor, std::nullopt, 0.0, kRoundOnce};
    }
  }

  void set_channels(std::string_view activation);
  void modulate(const Norm& norm, const Tensor& last_output);
  void group_by(const Tensor& rows);

  void add_input(TensorIndex index, const Tensor& tensor);
  void add_channels(TensorIndex index, Tensor channels, Access access);
  Tensor by_channels(const Tensor& tensor) const;
  void add_weight(const Tensor& weight);
  void add_modulation(TensorIndex index, const Tensor& tensor);
  void add_output(TensorIndex index, const Tensor& target);
  size_t dims_of(TensorIndex index) const;
  bool has_channels() const { return dim_ != 0; }
  bool is_permuted() const { return requirements_.by_groups && !order_.empty(); }
  Tensor by_group(const Tensor& rows) const;
  void set(TensorIndex index, Rows rows);
  void rotate(const Tensor& input, const Tensor& cos, const Tensor& sin, const Rope& rope);

  const Tensor& input_;
  size_t normalized_dims_;
  int64_t dim_;
  Requirements requirements_;
  bool weight_has_all_rows_ = false;
  c10::DimVector order_;        // of the dimensions of rows, by group; empty if they already are
  std::list<Tensor> permuted_;  // views of outputs, with rows in this order
  std::optional<Rows> rows_[kTensorCount];
  const Tensor* targets_[kTensorCount] = {};
};

}  // namespace normops
#pragma GCC visibility pop
