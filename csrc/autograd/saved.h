// The arguments of an operator as a node of autograd keeps them: tensors, and the rest as types that compiled autograd
// packs.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
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

template <class Argument>
constexpr bool is_attribute = std::tuple_size_v<decltype(attribute_of(std::declval<const Argument&>()))> > 0;

inline c10::SymIntArrayRef last_sizes(const Tensor& tensor, int64_t dims) {
  return tensor.sym_sizes().slice(tensor.dim() - dims, dims);
}

template <class Saved>
c10::SymIntArrayRef& shape_of(Saved& saved) {
  if constexpr (requires { saved.norm; }) {
    return saved.norm.normalized_shape;
  } else {
    return saved.normalized_shape;
  }
}

// The way back: f(saved).
template <class Saved, class Attributes, class F>
auto with_restored(const variable_list& tensors, const Attributes& attributes, const F& f) {
  return [&]<class... Argument>(const std::tuple<const Argument&...>*) {
    static constexpr bool are_tensors[] = {is_tensor<Argument>...}, are_attributes[] = {is_attribute<Argument>...};
    const auto restored = [&]<size_t i>(std::integral_constant<size_t, i>) -> decltype(auto) {
      using Type = std::tuple_element_t<i, std::tuple<Argument...>>;
      constexpr size_t tensor = std::count(are_tensors, are_tensors + i, true);
      constexpr size_t attribute = std::count(are_attributes, are_attributes + i, true);
      if constexpr (std::is_same_v<Type, Tensor>) {
        return (tensors[tensor]);
      } else if constexpr (std::is_same_v<Type, OptionalTensor>) {
        return tensors[tensor].defined() ? OptionalTensor(tensors[tensor]) : std::nullopt;
      } else if constexpr (std::is_same_v<Type, c10::SymIntArrayRef> || !is_attribute<Type>) {
        return Type();
      } else {
        return Type(std::get<attribute>(attributes));
      }
    };
    static constexpr bool are_shapes[] = {std::is_same_v<Argument, c10::SymIntArrayRef>...};
    constexpr size_t shape = std::find(are_shapes, std::end(are_shapes), true) - are_shapes;
    constexpr size_t dims = std::count(are_attributes, are_attributes + shape, true);
    const auto with_arguments = [&](const auto&... argument) {
      auto saved = make_arguments<Saved>(argument...);
      shape_of(saved) = last_sizes(saved.input, std::get<dims>(attributes));
      return f(saved);
    };
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return with_arguments(restored(std::integral_constant<size_t, i>())...);
    }(std::index_sequence_for<Argument...>());
  }(static_cast<Flat<Saved>*>(nullptr));
}

}  // namespace normops::detail
