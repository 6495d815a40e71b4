// The arguments of an operator as a node of autograd keeps them: tensors, and the rest as types that compiled autograd
// packs.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <tuple>

#include "../operator.h"

namespace normops::detail {

using torch::autograd::variable_list;

// What is saved of an argument that is no tensor, of a type that IValuePacker knows.
inline auto attribute_of(const Tensor&) { return std::tuple<>(); }
inline auto attribute_of(const OptionalTensor&) { return std::tuple<>(); }
template <size_t n>
auto attribute_of(const std::array<bool, n>&) {
  return std::tuple<>();
}
inline auto attribute_of(c10::SymIntArrayRef normalized_shape) {
  return std::tuple(static_cast<int64_t>(normalized_shape.size()));
}
inline auto attribute_of(std::string_view text) { return std::tuple(std::string(text)); }
template <class Number>
auto attribute_of(const Number& number) {
  return std::tuple(number);
}

template <class Saved>
auto attributes_of(const Saved& saved) {
  return std::apply([](const auto&... argument) { return std::tuple_cat(attribute_of(argument)...); }, flat(saved));
}

// The normalized_shape, of so many dimensions.
template <class Saved>
c10::SymIntArrayRef normalized_sizes(const Saved& saved, int64_t dims) {
  const auto sizes = saved.input.sym_sizes();
  if constexpr (requires { saved.dim; }) return sizes.slice(sizes.size() + saved.dim, 1);
  return sizes.slice(sizes.size() - dims, dims);
}

template <class Saved>
c10::SymIntArrayRef& shape_of(Saved& saved) {
  if constexpr (requires { saved.norm; }) {
    return saved.norm.normalized_shape;
  } else {
    return saved.normalized_shape;
  }
}

// Assigns the next of the saved tensors to an argument that is one.
template <class Argument>
void restore_tensor(Argument& argument, variable_list::const_iterator& next) {
  if constexpr (std::is_same_v<Argument, Tensor>) {
    argument = *next++;
  } else if constexpr (std::is_same_v<Argument, OptionalTensor>) {
    if (next->defined()) argument = *next;
    next++;
  }
}

// References to the variables that the attribute_of() an argument is assigned to.
template <class Argument>
auto attribute_target(Argument& argument, [[maybe_unused]] int64_t& dims) {
  if constexpr (std::is_same_v<Argument, c10::SymIntArrayRef>) {
    return std::tie(dims);
  } else if constexpr (std::tuple_size_v<decltype(attribute_of(argument))> > 0) {
    return std::tie(argument);
  } else {
    return std::tuple<>();
  }
}

// Restores the arguments from the saved tensors and attributes. Returns f(saved).
template <class Saved, class Attributes, class F>
auto with_restored(const variable_list& tensors, const Attributes& attributes, const F& f) {
  return [&]<class... Argument>(const std::tuple<const Argument&...>*) {
    std::tuple<Argument...> arguments;
    return std::apply(
        [&](Argument&... argument) {
          auto next = tensors.begin();
          (restore_tensor(argument, next), ...);
          int64_t dims = 0;
          std::tuple_cat(attribute_target(argument, dims)...) = attributes;
          auto saved = make_arguments<Saved>(argument...);
          shape_of(saved) = normalized_sizes(saved, dims);
          return f(saved);
        },
        arguments);
  }(static_cast<Flat<Saved>*>(nullptr));
}

}  // namespace normops::detail
