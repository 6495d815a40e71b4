// Converts calls of the channel operators to arguments of their kernels.
#pragma once
#include <ATen/ops/empty_like.h>

#include "../channel_rms_norm.h"
#include "../tensor_rows.h"
#include "sharing.h"

namespace normops::cpu {

// Returns the number of positions of a sample: the elements after `dim`, which counts from the end.
inline int64_t positions_of(const Tensor& tensor, int64_t dim) {
  return c10::multiply_integers(tensor.sizes().slice(tensor.dim() + dim + 1));
}

// Returns whether the kernels support these arguments. Contiguous channels, or channels with few positions, are
// normalized as rows instead.
template <class Operator>
bool has_channel_kernels(const Operator& arguments) {
  constexpr int64_t kLeastPositions = 8;
  const auto& [normalized_shape, weight, eps, weight_offset, rounding] = arguments.norm;
  const Tensor& input = arguments.input;
  const auto is_of_channels = [](const OptionalTensor& parameter) {
    return !is_given(parameter) || (parameter->dim() == 1 && parameter->scalar_type() != at::kDouble);
  };
  return (input.scalar_type() == at::kFloat || (input.scalar_type() == at::kBFloat16 && rounding == kRoundOnce)) &&
         is_of_channels(weight) && is_of_channels(arguments.bias) &&
         positions_of(input, arguments.dim) >= kLeastPositions && input.stride(arguments.dim) != 1;
}

// The arguments of a call, with positions as rows. Keeps its tensors alive.
class ChannelCall : public KernelArgs {
 public:
  template <class Operator>
  ChannelCall(const Operator& arguments, const OutputPtrs<Operator>& outputs)
      : KernelArgs(), bias_(DType::float32, is_given(arguments.bias) ? arguments.input.size(arguments.dim) : 0) {
    const auto& [input, norm, activation] = std::tie(arguments.input, arguments.norm, arguments.activation);
    dim_ = arguments.dim;
    channels.dtype = dtype_of(input);
    channels.positions = positions_of(input, dim_);
    cols = size = input.size(dim_);
    rows = input.numel() / cols;
    eps = resolve_eps(norm.eps, input.scalar_type());
    weight.groups = 1, weight.offset = norm.weight_offset == 0 ? -0.0 : norm.weight_offset;
    if (const auto kind = find_activation(activation); kind.has_value()) {
      channels.is_activated = true, gating.activation = *kind;
    }
    const auto inputs = tensors_of(arguments);
    for (size_t i = 0; i < inputs.size(); i++) add_input(Operator::kTensors[i], *inputs[i]);
    for (size_t i = 0; i < outputs.size(); i++) add_output(Operator::kTensors[inputs.size() + i], *outputs[i]);
  }
  ChannelCall(const ChannelCall&) = delete;

  int64_t elements() const { return rows * cols; }

  // Copies temporaries back to their outputs.
  void finish() const {
    for (int i = 0; i < kTensorCount; i++) {
      if (targets_[i] != nullptr && !held_[i].is_alias_of(*targets_[i])) {
        targets_[i]->copy_(held_[i].view(targets_[i]->sizes()));
      }
    }
  }

  Channels channels = {};

 private:
  // Returns the tensor as [samples, channels, positions], a copy unless positions are contiguous.
  Tensor by_channels(const Tensor& tensor) const {
    Tensor result = tensor.reshape({rows / channels.positions, cols, channels.positions});
    return result.stride(2) == 1 ? result : result.contiguous();
  }

  void add_input(TensorIndex index, const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (index == kWeight) {
      held_[index] = tensor.contiguous();
      weight.data = held_[index].const_data_ptr(), weight.dtype = dtype_of(tensor);
    } else if (index == kBias) {
      held_[index] = tensor.contiguous();
      rms_norm_kernels().scale(DType::float32, dtype_of(tensor), held_[index].const_data_ptr(), -0.0, bias_.data(),
                               cols);
      channels.bias = static_cast<const float*>(bias_.data());
    } else {
      set(index, by_channels(tensor));
    }
  }

  void add_output(TensorIndex index, const Tensor& target) {
    if (!target.defined()) return;
    const bool is_of_parameter = index == kGradWeight || index == kGradBias;
    const auto laid_out = [&](const Tensor& tensor) {
      return is_of_parameter ? tensor.contiguous() : by_channels(tensor);
    };
    Tensor own = laid_out(target);
    if (!own.is_alias_of(target)) own = laid_out(at::empty_like(target, at::MemoryFormat::Contiguous));
    targets_[index] = &target;
    set(index, std::move(own));
  }

  void set(TensorIndex index, Tensor tensor) {
    const DType dtype = dtype_of(tensor);
    if (tensor.dim() == 3) {
      channels.sample_strides[index] = tensor.stride(0) * size_of(dtype);
      channels.channel_strides[index] = tensor.stride(1) * size_of(dtype);
    }
    // Declares rows as float32, in which they are computed, so that weights and sums have that layout.
    args_[index] = {const_cast<void*>(tensor.const_data_ptr()), tensor.dim() == 3 ? DType::float32 : dtype,
                    kNoRows.layout};
    tensors[index] = &args_[index];
    held_[index] = std::move(tensor);
  }

  int64_t dim_;
  OwnScratch bias_;
  RowsArg args_[kTensorCount];
  Tensor held_[kTensorCount];
  const Tensor* targets_[kTensorCount] = {};
};

}  // namespace normops::cpu
