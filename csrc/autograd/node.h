// The node of an operator in autograd's graph, written once for all of them.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/new_zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../recompute.h"
#include "derivative.h"
#include "saved.h"

namespace normops {

template <class Operator>
class OperatorNode final : public RecomputableNode {
  using Saved = std::remove_pointer_t<decltype(detail::saved_of<Operator>())>;
  using Attributes = decltype(detail::attributes_of(std::declval<const Saved&>()));
  using NeededInputs = Needed<count_tensors<Operator>>;
  static constexpr size_t kSavedOutputs = detail::saved_outputs_of<Operator>();
  static constexpr bool kIsRecomputable = requires { &Derivative<Operator>::output; };

 public:
  template <class... Inputs>
  void connect(const Inputs&... inputs) {
    set_next_edges(torch::autograd::collect_next_edges(inputs...));
  }

  // Called after connect(), and after set_history() of saved outputs. `recomputed_from` has weight and bias of the
  // norm, which a recomputation of the output needs even if no gradient does.
  void save(const Saved& saved, const Saved& recomputed_from) {
    const auto tensors = tensors_of(saved), to_copy = tensors_of(recomputed_from);
    bool has_all = kIsRecomputable;
    for (size_t i = 0; i < tensors.size(); i++) {
      const Tensor& tensor = *tensors[i];
      has_all &= is_used(i) || !tensor.defined() || are_optional<Saved>[i];
      saved_[i] = torch::autograd::SavedVariable(is_used(i) ? tensor : zeros_in_place_of(tensor), is_output(i));
    }
    attributes_ = detail::attributes_of(saved);
    block_ = has_all ? Recomputation::current_block() : 0;
    if (block_ == 0) return;
    // Copies weight and bias: FSDP may free them before the backward, and a program may write to those that no gradient
    // depends on.
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (size_t i = 0; i < to_copy.size(); i++) {
      if (are_optional<Saved>[i] && to_copy[i]->defined()) bytes_to_copy_ += bytes_of(*to_copy[i]).value_or(0);
    }
    if (bytes_to_copy_ >= bytes_of(saved.input).value_or(INT64_MAX)) block_ = 0;
    for (size_t i = 0; block_ != 0 && i < to_copy.size(); i++) {
      if (are_optional<Saved>[i] && to_copy[i]->defined()) copies_[i] = to_copy[i]->clone();
    }
  }

  std::string name() const override { return Derivative<Operator>::kName; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    take_unpacked();
    if (!is_released_.exchange(true)) release();
  }

  variable_list apply(variable_list&& grad_outputs) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    const variable_list unpacked = take_unpacked();
    return backward(grad_outputs, unpacked.empty() ? unpack_saved() : unpacked, attributes_, needed());
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
    // waits here with the GIL: torch refuses concurrent compiled backwards.
    static const std::string function =
        compiler->bind_function(swap.get_py_compiler(), Derivative<Operator>::kName, apply_packed, packed_types());
    const auto input_metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grad_outputs, packed.vec(),
                                   input_metadata);
  }

 private:
  static constexpr bool is_output(size_t index) { return index < kSavedOutputs; }

  // Returns whether a gradient that may be requested depends on the tensor.
  bool is_used(size_t index) const {
    if constexpr (requires { Derivative<Operator>::kNeededForGrad; }) {
      constexpr Uses<count_tensors<Operator>, count_tensors<Saved>> kNeeded = Derivative<Operator>::kNeededForGrad;
      bool is_used = is_output(index);
      for (size_t i = 0; i < kNeeded.size(); i++) is_used |= kNeeded[i][index] && should_compute_output(i);
      return is_used;
    }
    return true;
  }

  Tensor recompute(variable_list tensors) override {
    for (size_t i = 0; i < tensors.size(); i++) {
      if (are_optional<Saved>[i]) tensors[i] = copies_[i];
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return detail::with_restored<Saved>(tensors, attributes_, [&](const Saved& saved) {
      if constexpr (kIsRecomputable) return Derivative<Operator>::output(saved, input_metadata(0).options());
      return Tensor();
    });
  }

  void reset_saved() override {
    for (auto& variable : saved_) variable.reset_data();
    copies_ = {};
  }

  // Returns one expanded zero, of which backward uses shape and dtype. No tensor expands to the shape of a nested one.
  static Tensor zeros_in_place_of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_nested()) return tensor;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return tensor.new_zeros({}).expand_symint(tensor.sym_sizes());
  }

  variable_list unpack_saved() override {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (const auto& variable : saved_) tensors.push_back(variable.unpack(this->getptr()));
    return tensors;
  }

  static variable_list backward(const variable_list& grad_outputs, const variable_list& tensors,
                                const Attributes& attributes, const NeededInputs& needed) {
    bool is_any_defined = false;
    for (const Tensor& grad_output : grad_outputs) is_any_defined |= grad_output.defined();
    if (!is_any_defined || needed == NeededInputs()) return variable_list(needed.size());
    return detail::with_restored<Saved>(tensors, attributes, [&](const Saved& saved) {
      return Derivative<Operator>::backward(grad_outputs, saved, needed);
    });
  }

  NeededInputs needed() const {
    NeededInputs needed;
    for (size_t i = 0; i < needed.size(); i++) needed[i] = task_should_compute_output(i);
    return needed;
  }

  static variable_list apply_packed(const variable_list& grad_outputs, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto saved = packed.unpack<variable_list>();
    const auto needed = packed.unpack<NeededInputs>();
    Attributes attributes;
    std::apply([&](auto&... attribute) { ((attribute = packed.unpack<std::decay_t<decltype(attribute)>>()), ...); },
               attributes);
    return backward(grad_outputs, saved, attributes, needed);
  }

  static std::vector<at::TypePtr> packed_types() {
    using namespace torch::dynamo::autograd;
    std::vector<at::TypePtr> types = {IValuePacker<variable_list>::packed_type(),
                                      IValuePacker<NeededInputs>::packed_type()};
    std::apply(
        [&](const auto&... attribute) {
          (types.push_back(IValuePacker<std::decay_t<decltype(attribute)>>::packed_type()), ...);
        },
        Attributes{});
    return types;
  }

  std::array<torch::autograd::SavedVariable, count_tensors<Saved>> saved_;
  std::array<Tensor, count_tensors<Saved>> copies_;  // of weight and bias, for recomputing the output
  Attributes attributes_;
};

// torch holds nodes by std::shared_ptr up to 2.12 and by c10::intrusive_ptr from 2.13, which has no deleteNode (found
// by argument-dependent lookup).
template <class Node>
auto make_node() {
  using Held = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Held, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(), [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

}  // namespace normops
