// Functionalizes the .out and in-place overloads: calls the functional operator and copies its outputs to the targets.
// So a compiled graph contains the same operators for all overloads.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "operators.h"

namespace normops {
namespace {

using at::functionalization::impl::isFunctionalTensor;

Tensor unwrap(const Tensor& tensor) {
  if (!tensor.defined() || !isFunctionalTensor(tensor)) return tensor;
  at::functionalization::impl::sync(tensor);
  return at::functionalization::impl::from_functional_tensor(tensor);
}

OptionalTensor unwrap(const OptionalTensor& tensor) {
  return is_given(tensor) ? OptionalTensor(unwrap(*tensor)) : std::nullopt;
}

template <class Argument>
Argument unwrap(const Argument& argument) {
  return argument;
}

void replace(const Tensor& target, const Tensor& value) {
  at::functionalization::impl::replace_(target, value);
  at::functionalization::impl::commit_update(target);
  at::functionalization::impl::sync(target);
}

struct Functionalize {
  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet, const Operator& arguments, const Targets<Operator>& targets) {
    const Like<Operator> like = arguments.like();
    Outputs<Operator> plain_targets;
    for (size_t i = 0; i < targets.size(); i++) {
      TORCH_CHECK(
          !like[i].is_wanted() || isFunctionalTensor(*targets[i]), name_of<Operator, overload>, ": expected ",
          target_name<Operator, overload>(i),
          " to be a tensor that is traced like the other arguments, but got one from outside the traced function");
      plain_targets[i] = unwrap(*targets[i]);
    }
    const auto plain_arguments =
        std::apply([](const auto&... argument) { return std::tuple(unwrap(argument)...); }, detail::flat(arguments));
    const at::AutoDispatchSkipFunctionalize guard;
    const auto plain =
        std::apply([](const auto&... argument) { return make_arguments<Operator>(argument...); }, plain_arguments);
    check_write<overload>(plain, std::apply([](auto&... t) { return Targets<Operator>{&t...}; }, plain_targets));
    const Outputs<Operator> outputs = call(plain);
    for (size_t i = 0; i < outputs.size(); i++) {
      if (outputs[i].defined()) replace(*targets[i], outputs[i]);
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, Functionalize, m) { register_writes<Functionalize>(m, Operators()); }

}  // namespace normops
