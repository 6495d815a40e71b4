// The overloads of every operator: the checks of those that write into given tensors, and the registration of kernels
// with the dispatcher.
#pragma once
#include <torch/library.h>

#include "operator.h"

namespace normops {

// Checks devices, and that tensors are given. Autograd's kernels call it: below them, a fake tensor hides its device.
template <Overload overload, class Operator>
void check_devices(const Operator& arguments) {
  constexpr const char* op = name_of<Operator, overload>;
  check_given(op, "input", arguments.input);
  const auto tensors = tensors_of(arguments);
  for (size_t i = 0; i < tensors.size(); i++) {
    if (!tensors[i]->defined() && !are_optional<Operator>[i]) check_given(op, tensor_names<Operator>()[i], *tensors[i]);
    if (tensors[i]->defined() && tensors[i]->device() != arguments.input.device()) {
      check_device(op, tensor_names<Operator>()[i], *tensors[i], arguments.input);
    }
  }
}

// Checks devices first, so that a call with several errors gets the same message in every mode.
template <Overload overload, class Operator>
void check(const Operator& arguments) {
  check_devices<overload>(arguments);
  arguments.check(name_of<Operator, overload>);
}

// Checks the arguments and the targets. A target that is not wanted is neither checked nor written.
template <Overload overload, class Operator>
void check_write(const Operator& arguments, const Targets<Operator>& targets) {
  constexpr const char* op = name_of<Operator, overload>;
  constexpr size_t kOverwritten = overload == Overload::inplace ? Operator::kOutputs : 0;
  check<overload>(arguments);
  const auto tensors = tensors_of(arguments);
  std::array<Named, tensors.size() - kOverwritten> read;
  for (size_t i = 0; i < read.size(); i++) {
    read[i] = {tensor_names<Operator>()[kOverwritten + i], tensors[kOverwritten + i]};
  }
  const Like<Operator> like = arguments.like();
  for (size_t i = 0; i < targets.size(); i++) {
    if (!like[i].is_wanted()) continue;
    const Named target = {target_name<Operator, overload>(i), targets[i]};
    check_out(op, target, like[i]);
    if constexpr (requires { arguments.check_target(op, i, target); }) arguments.check_target(op, i, target);
    if (like[i].is_per_row()) {  // written before the last row is read
      for (const Named& argument : read) check_disjoint(op, target, argument);
    }
    check_overlaps(op, target, read);
    for (size_t k = 0; k < i; k++) {
      if (like[k].is_wanted()) check_disjoint(op, {target_name<Operator, overload>(k), targets[k]}, target);
    }
  }
}

// Checks the memory of arguments and targets, before anything reads it. FSDP frees the storages of parameters.
template <Overload overload, class Operator>
void check_memory(const Operator& arguments, const Targets<Operator>& targets = {}) {
  constexpr const char* op = name_of<Operator, overload>;
  const auto tensors = tensors_of(arguments);
  for (size_t i = 0; i < tensors.size(); i++) check_memory(op, tensor_names<Operator>()[i], *tensors[i]);
  if constexpr (overload != Overload::functional) {
    const Like<Operator> like = arguments.like();
    for (size_t i = 0; i < targets.size(); i++) {
      if (like[i].is_wanted()) check_memory(op, target_name<Operator, overload>(i), *targets[i]);
    }
  }
}

// Allocates every output that is wanted.
template <class Operator, class Empty>
Outputs<Operator> new_outputs(const Operator& arguments, const Empty& empty_contiguous) {
  const Like<Operator> like = arguments.like();
  Outputs<Operator> outputs;
  for (size_t i = 0; i < outputs.size(); i++) {
    if (like[i].is_wanted()) outputs[i] = empty_contiguous(like[i]);
  }
  return outputs;
}

// `Kernels` implements all operators for a dispatch key, with one or both of
//   static Outputs<Operator> functional(c10::DispatchKeySet keys, const Operator& arguments)
//   static void write<overload>(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets)
template <class Kernels, class Operator, Overload overload, class = Signature<Operator, overload>>
struct Kernel;
template <class Kernels, class Operator, Overload overload, class Result, class... Raw>
struct Kernel<Kernels, Operator, overload, Result(Raw...)> {
  static Result call(c10::DispatchKeySet keys, Raw... raw) {
    const auto all = std::tie(raw...);
    constexpr size_t kOutputs = Operator::kOutputs;
    constexpr size_t kArguments = sizeof...(Raw) - (overload == Overload::out ? kOutputs : 0);
    return [&]<size_t... i, size_t... k>(std::index_sequence<i...>, std::index_sequence<k...>) -> Result {
      const auto arguments = make_arguments<Operator>(std::get<i>(all)...);
      if constexpr (overload == Overload::functional) {
        return to_result<Result>(arguments, Kernels::functional(keys, arguments));
      } else {
        constexpr size_t kFirst = overload == Overload::out ? kArguments : 0;
        if constexpr (overload == Overload::out && has_output_mask<Operator>) {
          Outputs<Operator> targets = {value_or_undefined(std::get<kFirst + k>(all))...};
          Kernels::template write<overload>(keys, arguments, Targets<Operator>{&targets[k]...});
        } else {
          Kernels::template write<overload>(keys, arguments, Targets<Operator>{&std::get<kFirst + k>(all)...});
        }
        if constexpr (!std::is_void_v<Result>) return Result(std::get<kFirst + k>(all)...);
      }
    }(std::make_index_sequence<kArguments>(), std::make_index_sequence<kOutputs>());
  }
};

template <class... Operators>
struct List {};

template <class... First, class... Second>
List<First..., Second...> join(List<First...>, List<Second...>);
template <class First, class Second>
using Joined = decltype(join(First(), Second()));

template <class Kernels, class... Operators>
void register_functional(torch::Library& m, List<Operators...>) {
  (m.impl(Operators::kName, &Kernel<Kernels, Operators, Overload::functional>::call), ...);
}

template <class Kernels, class Operator>
void register_writes_of(torch::Library& m) {
  m.impl((std::string(Operator::kName) + ".out").c_str(), &Kernel<Kernels, Operator, Overload::out>::call);
  if constexpr (Operator::kInplaceName != nullptr) {
    m.impl(Operator::kInplaceName, &Kernel<Kernels, Operator, Overload::inplace>::call);
  }
}

template <class Kernels, class... Operators>
void register_writes(torch::Library& m, List<Operators...>) {
  (register_writes_of<Kernels, Operators>(m), ...);
}

template <class Kernels, class Operators>
void register_all(torch::Library& m, Operators operators) {
  register_functional<Kernels>(m, operators);
  register_writes<Kernels>(m, operators);
}

}  // namespace normops
