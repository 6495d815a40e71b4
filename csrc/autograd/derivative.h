// The derivative of an operator, which its page gives.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <iterator>

#include "../operator.h"

namespace normops {

using torch::autograd::variable_list;

// The derivative of an operator, on the page of each:
//   static constexpr const char* kName;            its name in autograd's graph
//   static constexpr Uses kNeededForGrad;          for the gradient of each tensor among the arguments: which of the
//                                                  saved tensors it depends on
//   static variable_list backward(const variable_list& grad_outputs, const Saved& saved, Needed needed);
// one gradient for each tensor among the arguments. It works on its arguments alone, so that compiled autograd can
// trace it. In the place of a tensor on which no gradient depends that can be wanted, it gets zeros: that one is not
// kept. `Saved` is the operator itself, whose arguments are saved, but for an output_mask: gradients of what that
// left out are undefined. Or else Derivative has
//   using Saved = ...;                             another struct of arguments, whose first tensors are
//   static constexpr size_t kSavedOutputs;         so many of this one's outputs
//   static Saved saved(const Operator& arguments, const Outputs<Operator>& outputs);
//   static Saved sources(const Operator& arguments, const Outputs<Operator>& outputs);  see output() below
// Which tensors are saved is a function of the arguments alone: a checkpoint saves them again in another place.
// If the first output can be computed again, with the same bits, of what is saved, it has
//   static Tensor output(const Saved& saved, const at::TensorOptions& options);  those of the output
// where the optional tensors of `saved` are copies of those of sources(), which need not be saved.
// Without a backward(), its gradients are those of composite(), by autograd: for operators that are derivatives
// themselves, of which models seldom ask for gradients.
// If it does not give the gradients of all arguments, it has
//   static bool handles_all_grads(const Operator& arguments);  whether none of the others is asked for
template <class Operator>
struct Derivative;

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
