// Autograd's kernels, written once for all operators.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>

#include "../composite/kernels.h"
#include "node.h"

namespace normops {

// Returns whether any tensor has a forward-mode tangent. Avoids isFwGradDefined, which copies its arguments.
template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return ((tensors.defined() && tensors._fw_grad(/*level=*/0).defined()) || ...);
}

// Returns whether the operator's derivative computes all requested gradients.
template <class Operator>
bool is_covered([[maybe_unused]] const Operator& arguments) {
  if constexpr (requires { Derivative<Operator>::handles_all_grads(arguments); }) {
    return Derivative<Operator>::handles_all_grads(arguments);
  }
  return has_derivative<Operator>;
}

// Autograd's kernels. They call composite(arguments), the operator's definition in ATen operators, for forward mode and
// for gradients that the derivative does not compute.
struct Autograd {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet keys, const Operator& arguments) {
    check_devices<Overload::functional>(arguments);
    const auto run = [&](auto*... tensor) -> Outputs<Operator> {
      const bool requires_grad = torch::autograd::compute_requires_grad(*tensor...);
      if (has_tangent(*tensor...) || (requires_grad && !is_covered(arguments))) {
        arguments.check(Operator::kName);
        return Composite::run_composite(arguments);
      }
      if constexpr (has_derivative<Operator>) {
        if (requires_grad) return record(keys, arguments, *tensor...);
      }
      return to_array<Operator>(below(keys, arguments));
    };
    return std::apply(run, tensors_of(arguments));
  }

  // Raises an error if an argument requires a gradient: operators that write into given tensors are not differentiable.
  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
    check_devices<overload>(arguments);
    const auto asks = [](auto*... tensor) {
      return torch::autograd::compute_requires_grad(*tensor...) || has_tangent(*tensor...);
    };
    bool is_asked = std::apply(asks, tensors_of(arguments));
    const Like<Operator> like = arguments.like();
    for (size_t i = 0; i < targets.size(); i++) is_asked |= like[i].is_wanted() && asks(targets[i]);
    TORCH_CHECK(!is_asked, name_of<Operator, overload>,
                ": expected no argument to require a gradient, as an operator that writes into its arguments does not "
                "support automatic differentiation, but got one that does; call it under torch.no_grad()");
    const at::AutoDispatchBelowADInplaceOrView guard;
    redispatch<overload>(keys & c10::after_autograd_keyset, arguments, targets);
  }

 private:
  template <class Operator, class... Inputs>
  static Outputs<Operator> record(c10::DispatchKeySet keys, const Operator& arguments, const Inputs&... inputs) {
    constexpr bool kSavesOutputs = detail::saved_outputs_of<Operator>() > 0;
    const auto node = make_node<OperatorNode<Operator>>();
    node->connect(inputs...);
    // Saves before the operator runs, as a checkpoint stops recomputing once everything is saved.
    if constexpr (!kSavesOutputs) save(*node, arguments, {});
    Outputs<Operator> outputs = to_array<Operator>(below(keys, arguments));
    const Like<Operator> like = arguments.like();
    for (size_t i = 0; i < outputs.size(); i++) {
      torch::autograd::set_history(defined_if(like[i].is_wanted(), outputs[i]), node);
    }
    if constexpr (kSavesOutputs) save(*node, arguments, outputs);
    return outputs;
  }

  template <class Operator>
  static auto below(c10::DispatchKeySet keys, const Operator& arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch<Overload::functional>(keys & c10::after_autograd_keyset, arguments, {});
  }

  template <class Operator>
  static void save(OperatorNode<Operator>& node, const Operator& arguments, const Outputs<Operator>& outputs) {
    if constexpr (requires { Derivative<Operator>::saved(arguments, outputs); }) {
      node.save(Derivative<Operator>::saved(arguments, outputs),
                Derivative<Operator>::recomputed_from(arguments, outputs));
    } else {
      node.save(arguments, arguments);
    }
  }
};

}  // namespace normops
