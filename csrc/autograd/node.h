// The autograd node of an operator, written once for all of them.
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../check.h"

namespace normops {

using torch::autograd::variable_list;

// `Gradient` supplies
//   static constexpr const char* kName;
//   static constexpr size_t kSaved, kInputs;   how many tensors it saves, and how many gradients it returns
//   static constexpr size_t kSavedOutputs;     how many of the tensors are the operator's outputs; they come first
//   using Attributes = std::tuple<...>;        the other arguments it needs, of types that IValuePacker knows
//   static variable_list backward(const variable_list& grad_outputs, const variable_list& saved, const Attributes&,
//                                 const std::array<bool, kInputs>& needed);
// The function works on its arguments alone, so that compiled autograd can trace it.
template <class Gradient>
class OperatorNode final : public torch::autograd::Node {
  using Attributes = typename Gradient::Attributes;
  using Needed = std::array<bool, Gradient::kInputs>;

 public:
  template <class... Inputs>
  void connect(const Inputs&... inputs) {
    set_next_edges(torch::autograd::collect_next_edges(inputs...));
  }

  // Once the outputs among the tensors have their history.
  template <class... Tensors>
  void save(Attributes attributes, const Tensors&... tensors) {
    static_assert(sizeof...(Tensors) == Gradient::kSaved);
    size_t index = 0;
    saved_ = {torch::autograd::SavedVariable(tensors, is_output(index++))...};
    attributes_ = std::move(attributes);
  }

  std::string name() const override { return Gradient::kName; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
  }

  variable_list apply(variable_list&& grad_outputs) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return Gradient::backward(grad_outputs, unpack_saved(), attributes_, needed());
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < saved_.size(); i++) args.collect(saved_[i], is_output(i));
    std::apply([&](const auto&... attribute) { (args.collect(attribute), ...); }, attributes_);
  }

  variable_list apply_with_saved(const variable_list& grad_outputs,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (auto& variable : saved_) swap.before(variable);
    PackedArgs packed;
    packed.pack(unpack_saved());
    packed.pack(needed());
    std::apply([&](const auto&... attribute) { (packed.pack(attribute), ...); }, attributes_);
    for (auto& variable : saved_) swap.after(variable);

    const auto& compiler = getPyCompilerInterface();
    // Compiled autograd keeps one table of functions for the whole process. Binding runs Python, but no other thread
    // waits here with the GIL: torch refuses a second compiled backward beside this one.
    static const std::string function =
        compiler->bind_function(swap.get_py_compiler(), Gradient::kName, apply_packed, packed_types());
    const auto input_metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grad_outputs, packed.vec(),
                                   input_metadata);
  }

 private:
  static constexpr bool is_output(size_t index) { return index < Gradient::kSavedOutputs; }

  variable_list unpack_saved() {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (const auto& variable : saved_) tensors.push_back(variable.unpack(this->getptr()));
    return tensors;
  }

  Needed needed() const {
    Needed needed;
    for (size_t i = 0; i < needed.size(); i++) needed[i] = task_should_compute_output(i);
    return needed;
  }

  static variable_list apply_packed(const variable_list& grad_outputs, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto saved = packed.unpack<variable_list>();
    const auto needed = packed.unpack<Needed>();
    Attributes attributes;
    std::apply([&](auto&... attribute) { ((attribute = packed.unpack<std::decay_t<decltype(attribute)>>()), ...); },
               attributes);
    return Gradient::backward(grad_outputs, saved, attributes, needed);
  }

  static std::vector<at::TypePtr> packed_types() {
    using namespace torch::dynamo::autograd;
    std::vector<at::TypePtr> types = {IValuePacker<variable_list>::packed_type(), IValuePacker<Needed>::packed_type()};
    std::apply(
        [&](const auto&... attribute) {
          (types.push_back(IValuePacker<std::decay_t<decltype(attribute)>>::packed_type()), ...);
        },
        Attributes{});
    return types;
  }

  std::array<torch::autograd::SavedVariable, Gradient::kSaved> saved_;
  Attributes attributes_;
};

// torch holds nodes by std::shared_ptr up to 2.12 and by c10::intrusive_ptr from 2.13, where deleteNode (found by its
// argument) is gone.
template <class Node>
auto make_node() {
  using Held = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Held, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(), [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

// What the gradients of all norms need besides tensors: normalized_dims, eps, weight_offset.
using NormAttributes = std::tuple<int64_t, std::optional<double>, double>;

inline NormAttributes make_attributes(c10::SymIntArrayRef normalized_shape, std::optional<double> eps,
                                      double weight_offset) {
  return {static_cast<int64_t>(normalized_shape.size()), eps, weight_offset};
}

inline c10::SymIntArrayRef last_sizes(const Tensor& tensor, int64_t dims) {
  return tensor.sym_sizes().slice(tensor.dim() - dims, dims);
}

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Runs an operator below autograd.
template <class Signature, class... Arguments>
auto redispatch(const c10::TypedOperatorHandle<Signature>& op, c10::DispatchKeySet keys, Arguments&&... arguments)
    -> decltype(op.redispatch(keys, std::forward<Arguments>(arguments)...)) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_autograd_keyset, std::forward<Arguments>(arguments)...);
}

// Whether any of them has a tangent of forward mode. Not isFwGradDefined, which takes copies.
template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return ((tensors.defined() && tensors._fw_grad(/*level=*/0).defined()) || ...);
}

// Operators that write into given tensors are not differentiable: says so if an argument asks for it.
template <class... Tensors>
void check_no_grad(const char* op, const Tensors&... tensors) {
  TORCH_CHECK(!torch::autograd::compute_requires_grad(tensors...) && !has_tangent(tensors...), op,
              ": expected no argument to require a gradient, as an operator that writes into its arguments does not "
              "support automatic differentiation, but got one that does; call it under torch.no_grad()");
}

}  // namespace normops
