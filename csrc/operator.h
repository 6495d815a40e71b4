// An operator is a struct whose members are its arguments, in the schema's order. The dispatcher's signature, handle
// and calls of every overload are derived from them.
//
// In addition, the struct defines
//   kName, kInplaceName        the operator's name, and that of its in-place overload or null
//   kOutputs                   the number of tensors that it returns
//   kTensors                   the tensors among its members, then those that it returns
//   members()                  std::tie of the members
//   check(op)                  throws an error of `op` if arguments, which are on one device, are invalid
//   like()                     the shape and the dtype of each output, see OutputSpec
//   fill(kernel_args)          optional: sets kernel arguments other than tensors and the norm
// One of its members is the tensor `input`. An in-place overload writes output i over argument i.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "check.h"
#include "kernel_args.h"

namespace normops {

// "once" rounds only the result, "llama" each step, as models in transformers do (see Rounding).
constexpr std::string_view kRoundOnce = "once";
std::optional<Rounding> parse_rounding(std::string_view rounding);

#pragma GCC visibility push(default)  // for the Python module
std::optional<Activation> find_activation(std::string_view name);
#pragma GCC visibility pop

inline const OptionalTensor kNoTensor;

// The arguments that all norms share.
struct Norm {
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor& weight;
  std::optional<double> eps;
  double weight_offset;
  std::string_view rounding;

  Rounding parsed_rounding() const { return *parse_rounding(rounding); }  // requires a checked rounding
  size_t dims() const { return normalized_shape.size(); }
  auto members() const { return std::tie(normalized_shape, weight, eps, weight_offset, rounding); }
};

enum class Overload { functional, out, inplace };

// The shape and the dtype of an output: those of an argument, or those of one number for each of its rows, in the
// compute dtype. If the argument is undefined, the output is not wanted.
class OutputSpec {
 public:
  OutputSpec(const Tensor* argument) : argument_(argument) {}  // NOLINT: implicit
  static OutputSpec numbers_of_rows(const Tensor& argument, size_t normalized_dims) {
    OutputSpec result(&argument);
    result.normalized_dims_ = normalized_dims;
    return result;
  }

  bool is_wanted() const { return argument_->defined(); }
  bool is_per_row() const { return normalized_dims_ > 0; }
  const Tensor& argument() const { return *argument_; }
  c10::SymIntArrayRef sym_sizes() const { return leading(argument_->sym_sizes()); }
  at::IntArrayRef sizes() const { return leading(argument_->sizes()); }
  at::ScalarType scalar_type() const {
    const at::ScalarType dtype = argument_->scalar_type();
    return !is_per_row() || dtype == at::kDouble ? dtype : at::kFloat;
  }
  at::TensorOptions options() const { return argument_->options().dtype(scalar_type()); }

 private:
  template <class Sizes>
  Sizes leading(Sizes sizes) const {
    return sizes.slice(0, sizes.size() - normalized_dims_);
  }

  const Tensor* argument_;
  size_t normalized_dims_ = 0;  // dropped from the output's shape
};

template <class Operator>
using Outputs = std::array<Tensor, Operator::kOutputs>;  // undefined if not wanted
template <class Operator>
using Targets = std::array<Tensor*, Operator::kOutputs>;  // the targets of .out and in-place overloads

// The .out overload of a backward takes optional targets, as output_mask may exclude some gradients.
template <class Operator>
constexpr bool has_output_mask = requires(const Operator& arguments) { arguments.output_mask; };

template <class Operator>
using OutputPtrs = std::array<const Tensor*, Operator::kOutputs>;  // written by kernels; undefined if not wanted
template <class Operator>
using Like = std::array<OutputSpec, Operator::kOutputs>;

namespace detail {

// Returns the arguments as a flat tuple: the members of a Norm are arguments of the operator.
template <class Member>
auto flat(const Member& member) {
  if constexpr (requires { member.members(); }) {
    return std::apply([](const auto&... members) { return std::tuple_cat(flat(members)...); }, member.members());
  } else {
    return std::tie(member);
  }
}

template <class Operator>
using Flat = decltype(flat(std::declval<const Operator&>()));

// The type that the dispatcher passes an argument as: a reference for tensors.
template <class Argument>
constexpr bool is_tensor = std::is_same_v<Argument, Tensor> || std::is_same_v<Argument, OptionalTensor>;
template <class Argument>
using Passed = std::conditional_t<is_tensor<Argument>, const Argument&, Argument>;

template <size_t>
using TensorReference = Tensor&;
template <size_t>
using NewTensor = Tensor;
template <size_t>
using OptionalTarget = const OptionalTensor&;
template <size_t>
using OptionalResult = OptionalTensor;

template <size_t count, template <size_t> class Each, size_t... i>
auto tuple_of(std::index_sequence<i...>) -> std::tuple<Each<i>...>;
template <size_t count, template <size_t> class Each>
using Result =
    std::conditional_t<count == 1, Each<0>, decltype(tuple_of<count, Each>(std::make_index_sequence<count>()))>;

template <class Operator, class Arguments, class Indices = std::make_index_sequence<Operator::kOutputs>>
struct Signatures;
template <class Operator, class... Arguments, size_t... i>
struct Signatures<Operator, std::tuple<const Arguments&...>, std::index_sequence<i...>> {
  static constexpr size_t kOutputs = Operator::kOutputs, kArguments = sizeof...(Arguments);
  using Functional = Result<kOutputs, NewTensor>(Passed<Arguments>...);
  using Out = std::conditional_t<has_output_mask<Operator>,
                                 Result<kOutputs, OptionalResult>(Passed<Arguments>..., OptionalTarget<i>...),
                                 Result<kOutputs, TensorReference>(Passed<Arguments>..., TensorReference<i>...)>;

  template <size_t... k>
  static auto inplace(std::index_sequence<k...>)  // the dispatcher cannot box a call that returns several arguments
      -> std::conditional_t<kOutputs == 1, Tensor&, void> (*)(
          std::conditional_t<(k < kOutputs), Tensor&, Passed<Arguments>>...);
  using Inplace = std::remove_pointer_t<decltype(inplace(std::make_index_sequence<kArguments>()))>;
};

}  // namespace detail

template <class Operator, Overload overload = Overload::functional>
using Signature = std::conditional_t<
    overload == Overload::functional, typename detail::Signatures<Operator, detail::Flat<Operator>>::Functional,
    std::conditional_t<overload == Overload::out, typename detail::Signatures<Operator, detail::Flat<Operator>>::Out,
                       typename detail::Signatures<Operator, detail::Flat<Operator>>::Inplace>>;

template <class Operator, Overload overload = Overload::functional>
constexpr const char* name_of = overload == Overload::inplace ? Operator::kInplaceName : Operator::kName;

template <class Operator, Overload overload = Overload::functional>
const auto& op() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow((std::string("normops::") + name_of<Operator, overload>).c_str(),
                                                    overload == Overload::out ? "out" : "")
                                 .template typed<Signature<Operator, overload>>();
  return handle;
}

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Calls f with the arguments of the overload: the operator's, and the tensors to write to.
template <Overload overload, class Operator, class F>
decltype(auto) with_arguments(const Operator& arguments, const Targets<Operator>& targets, const F& f) {
  const auto flat = detail::flat(arguments);
  constexpr size_t kArguments = std::tuple_size_v<decltype(flat)>, kOutputs = Operator::kOutputs;
  constexpr size_t kOverwritten = overload == Overload::inplace ? kOutputs : 0;
  return [&]<size_t... i, size_t... k>(std::index_sequence<i...>, std::index_sequence<k...>) -> decltype(auto) {
    if constexpr (overload == Overload::functional) {
      return f(std::get<i>(flat)...);
    } else if constexpr (overload == Overload::out) {
      if constexpr (has_output_mask<Operator>) {
        return f(std::get<i>(flat)..., if_defined(*targets[k])...);
      } else {
        return f(std::get<i>(flat)..., *targets[k]...);
      }
    } else {
      return f(*targets[k]..., std::get<kOutputs + i>(flat)...);
    }
  }(std::make_index_sequence<kArguments - kOverwritten>(), std::make_index_sequence<kOutputs>());
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-braces"  // around the members of a Norm
template <class Operator, class... Arguments>
Operator make_arguments(const Arguments&... arguments) {
  return Operator{arguments...};
}
#pragma GCC diagnostic pop

// Converts results of the dispatcher to an array.
template <class Operator>
Outputs<Operator> to_array(std::conditional_t<Operator::kOutputs == 1, Tensor,
                                              detail::Result<Operator::kOutputs, detail::NewTensor>>&& result) {
  if constexpr (Operator::kOutputs == 1) {
    return {std::move(result)};
  } else {
    return std::apply([](auto&... outputs) { return Outputs<Operator>{std::move(outputs)...}; }, result);
  }
}

// Returns an empty tensor for each result that is not wanted. AOTInductor and DTensor require a tensor, and results of
// type `Tensor?` do not support torch.autograd.grad(is_grads_batched=True).
template <class Result, class Operator>
Result to_result(const Operator& arguments, Outputs<Operator>&& outputs) {
  if constexpr (Operator::kOutputs == 1) {
    return std::move(outputs[0]);
  } else {
    for (Tensor& output : outputs) {
      if (!output.defined()) output = at::empty({0}, arguments.input.options());
    }
    return std::apply([](auto&... output) { return Result(std::move(output)...); }, outputs);
  }
}

// Calls the operator. A result that is not wanted is undefined.
template <class Operator>
Outputs<Operator> call(const Operator& arguments) {
  Outputs<Operator> outputs = with_arguments<Overload::functional>(
      arguments, {}, [](const auto&... argument) { return to_array<Operator>(op<Operator>().call(argument...)); });
  const Like<Operator> like = arguments.like();
  for (size_t i = 0; i < outputs.size(); i++) {
    if (!like[i].is_wanted()) outputs[i].reset();
  }
  return outputs;
}

// Redispatches an overload to the highest of the dispatch keys `keys`.
template <Overload overload, class Operator>
decltype(auto) redispatch(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
  return with_arguments<overload>(arguments, targets, [&](auto&&... argument) -> decltype(auto) {
    return op<Operator, overload>().redispatch(keys, argument...);
  });
}

// Returns the tensors among the arguments; undefined if not given.
template <class Operator>
auto tensors_of(const Operator& arguments) {
  const auto tensor = [](const auto& argument) {
    using Argument = std::decay_t<decltype(argument)>;
    if constexpr (std::is_same_v<Argument, Tensor>) {
      return std::array{&argument};
    } else if constexpr (std::is_same_v<Argument, OptionalTensor>) {
      return std::array{&value_or_undefined(argument)};
    } else {
      return std::tuple<>();
    }
  };
  const auto found =
      std::apply([&](const auto&... argument) { return std::tuple_cat(tensor(argument)...); }, detail::flat(arguments));
  return std::apply([](auto... tensor) { return std::array<const Tensor*, sizeof...(tensor)>{tensor...}; }, found);
}

template <class Operator>
constexpr size_t count_tensors = std::tuple_size_v<decltype(tensors_of(std::declval<const Operator&>()))>;

namespace detail {

template <class Operator, class... Argument>
constexpr auto optional_tensors(const std::tuple<const Argument&...>*) {
  std::array<bool, count_tensors<Operator>> are_optional = {};
  size_t count = 0;
  ((is_tensor<Argument> ? void(are_optional[count++] = std::is_same_v<Argument, OptionalTensor>) : void()), ...);
  return are_optional;
}

}  // namespace detail

// Marks the optional tensors among the arguments.
template <class Operator>
constexpr auto are_optional = detail::optional_tensors<Operator>(static_cast<detail::Flat<Operator>*>(nullptr));

// Returns the names of the tensors among the arguments, from the schema.
template <class Operator>
const auto& tensor_names() {
  static const auto names = [] {
    std::array<const char*, count_tensors<Operator>> names;
    size_t count = 0, position = 0;
    const auto& arguments = op<Operator>().schema().arguments();
    const auto visit = [&](auto is_tensor) {
      if (is_tensor) names[count++] = arguments[position].name().c_str();
      position++;
    };
    [&]<class... Argument>(const std::tuple<const Argument&...>*) {
      (visit(std::bool_constant<detail::is_tensor<Argument>>()), ...);
    }(static_cast<detail::Flat<Operator>*>(nullptr));
    return names;
  }();
  return names;
}

// Returns the name of the argument that output i is written to.
template <class Operator, Overload overload>
const char* target_name(size_t i) {
  static const auto names = [] {
    std::array<const char*, Operator::kOutputs> names;
    const auto& arguments = op<Operator, overload>().schema().arguments();
    const size_t first = overload == Overload::out ? arguments.size() - Operator::kOutputs : 0;
    for (size_t k = 0; k < names.size(); k++) names[k] = arguments[first + k].name().c_str();
    return names;
  }();
  return names[i];
}

inline const Tensor& defined_if(bool wanted, const Tensor& tensor) { return wanted ? tensor : kUndefined; }

}  // namespace normops
