// The fallback for devices without a kernel: runs the operators' definitions in ATen operators.
#pragma once
#include "../overloads.h"

namespace normops {

struct Composite {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet, const Operator& arguments) {
    check<Overload::functional>(arguments);
    check_memory<Overload::functional>(arguments);
    return run_composite(arguments);
  }

  template <class Operator>
  static Outputs<Operator> run_composite(const Operator& arguments) {
    auto outputs = to_array<Operator>(composite(arguments));
    for (Tensor& output : outputs) {
      if (output.defined()) output = with_new_strides(output);
    }
    return outputs;
  }

  // Returns the tensor with the strides of a new one, which Meta kernels give their outputs. contiguous() leaves those
  // of dimensions of size 1 or 0 unchanged.
  static Tensor with_new_strides(const Tensor& tensor) {
    const Tensor contiguous = tensor.contiguous();
    if (tensor.is_nested()) return contiguous;
    const auto sizes = contiguous.sym_sizes(), strides = contiguous.sym_strides();
    c10::SymInt stride = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      if (TORCH_GUARD_OR_FALSE(strides[d].sym_ne(stride))) return contiguous.clone(at::MemoryFormat::Contiguous);
      if (TORCH_GUARD_OR_TRUE(sizes[d].sym_gt(1))) stride = stride * sizes[d];
    }
    return contiguous;
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet, const Operator& arguments, const Targets<Operator>& targets) {
    check_write<overload>(arguments, targets);
    check_memory<overload>(arguments, targets);
    const auto outputs = to_array<Operator>(composite(arguments));
    for (size_t i = 0; i < outputs.size(); i++) {
      if (outputs[i].defined()) targets[i]->copy_(outputs[i]);
    }
  }
};

}  // namespace normops
