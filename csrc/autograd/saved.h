// The arguments of an operator as an autograd node stores them: tensors, and other arguments as types that compiled
// autograd can pack.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <tuple>

#include "../operator.h"

namespace normops::detail {

using torch::autograd::variable_list;

// Returns what a node stores for an argument other than a tensor, in types that IValuePacker supports.
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

// Returns the normalized_shape, which has `dims` dimensions.
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

// Assigns the next saved tensor to the argument if it is a tensor.
template <class Argument>
void restore_tensor(Argument& argument, variable_list::const_iterator& next) {
  if constexpr (std::is_same_v<Argument, Tensor>) {
    argument = *next++;
  } else if constexpr (std::is_same_v<Argument, OptionalTensor>) {
    if (next->defined()) argument = *next;
    next++;
  }
}

// Returns references to the variables that attribute_of(argument) is assigned to.
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
