// The derivative of an operator: a template that autograd/*.cpp specialize.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <iterator>

#include "../operator.h"

namespace normops {

using torch::autograd::variable_list;

// The derivative of an operator. Each specialization defines
//   static constexpr const char* kName;            the name of the node in autograd's graph
//   static constexpr Uses kNeededForGrad;          optional: for the gradient of each tensor argument, the
//                                                  saved tensors that it depends on; by default all of them
//   static variable_list backward(const variable_list& grad_outputs, const Saved& saved, Needed needed);
// backward() returns a gradient for each tensor argument, of the argument's dtype or of a wider one. It depends only on
// its parameters, so that compiled autograd can trace it, and consists of differentiable operators, so that every
// transform sees it and its own derivatives follow. A tensor that no gradient to be computed depends on is not saved:
// backward() gets zeros instead. By default, `Saved` is the operator, whose arguments are saved except output_mask:
// gradients of outputs that the mask excludes are undefined. Otherwise, the specialization defines
//   using Saved = ...;                             another struct of arguments, whose first tensors are
//   static constexpr size_t kSavedOutputs;         this many of the operator's outputs
//   static Saved saved(const Operator& arguments, const Outputs<Operator>& outputs);
//   static Saved recomputed_from(const Operator& arguments, const Outputs<Operator>& outputs);  see output() below
// The arguments alone determine which tensors are saved: a checkpoint saves them again in another place.
// If the first output can be recomputed from the saved tensors with the same bits, it defines
//   static Tensor output(const Saved& saved, const at::TensorOptions& options);  the options of the output
// where the optional tensors of `saved` are copies of those of recomputed_from(), which need not be saved.
// If it does not compute the gradients of all arguments, it defines
//   static bool handles_all_grads(const Operator& arguments);  whether no other gradient is requested
// Without a specialization, or for such a gradient, the operator runs its composite(), which autograd records.
template <class Operator>
struct Derivative;

template <class Operator>
constexpr bool has_derivative = requires { Derivative<Operator>::kName; };

template <size_t n>
using Needed = std::array<bool, n>;

template <size_t gradients, size_t saved>
using Uses = std::array<std::array<bool, saved>, gradients>;

template <size_t n>
variable_list to_list(std::array<Tensor, n>&& tensors) {
  return variable_list(std::make_move_iterator(tensors.begin()), std::make_move_iterator(tensors.end()));
}

namespace detail {

template <class Operator>
auto saved_of() {
  if constexpr (requires { typename Derivative<Operator>::Saved; }) {
    return static_cast<typename Derivative<Operator>::Saved*>(nullptr);
  } else {
    return static_cast<Operator*>(nullptr);
  }
}

template <class Operator>
constexpr size_t saved_outputs_of() {
  if constexpr (requires { Derivative<Operator>::kSavedOutputs; }) return Derivative<Operator>::kSavedOutputs;
  return 0;
}

}  // namespace detail
}  // namespace normops
