#include "recompute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace normops {

using torch::autograd::variable_list;

bool is_described_by_storage(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return tensor.has_storage() && tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_neg() &&
         !tensor.is_conj() && !tensor.key_set().has_any(kWrapped);
}

std::optional<int64_t> bytes_of(const Tensor& tensor) {
  const auto count = tensor.sym_numel().maybe_as_int();
  return count.has_value() ? std::optional(*count * static_cast<int64_t>(tensor.itemsize())) : std::nullopt;
}

namespace {

// The entered blocks, each with the backward in which it was entered, or -1. In a backward, a checkpoint runs its body
// again: blocks around the backward do not count, as copies of weights would be operators that it does not expect.
thread_local std::vector<std::pair<int64_t, int>> blocks_here;

// Returns the tensor or, for a view, its base: possibly the output of a norm. Undefined if it cannot be one.
Tensor output_of(const Tensor& tensor) {
  if (!tensor.requires_grad() || tensor._version() != 0) return Tensor();
  if (!tensor.is_view()) return tensor;
  const Tensor base(tensor._base());
  const bool is_known =
      is_described_by_storage(tensor) && is_described_by_storage(base) && tensor.scalar_type() == base.scalar_type();
  return is_known ? base : Tensor();
}

RecomputableNode* node_of(const Tensor& output) {
  return output.defined() && output.output_nr() == 0 ? dynamic_cast<RecomputableNode*>(output.grad_fn().get())
                                                     : nullptr;
}

}  // namespace

bool RecomputableNode::is_recomputed_in(int64_t block, const Tensor& output) const {
  return block_ != 0 && block_ >= block && !is_released_ && bytes_to_copy_ < bytes_of(output).value_or(INT64_MAX);
}

void RecomputableNode::release() {
  {
    const std::lock_guard lock(recompute_mutex_);
    if (--references_ > 0) return;
  }
  reset_saved();
}

variable_list RecomputableNode::take_unpacked() {
  const std::lock_guard lock(recompute_mutex_);
  variable_list unpacked = std::exchange(unpacked_, {});
  return unpacked_in_ == torch::autograd::get_current_graph_task_id() ? unpacked : variable_list();
}

std::pair<int64_t, int64_t> Recomputation::enter_block() {
  static std::atomic<int64_t> last = 0;
  const int64_t block = ++last, outer = blocks_here.empty() ? 0 : blocks_here.back().first;
  blocks_here.emplace_back(block, torch::autograd::get_current_graph_task_id());
  return {block, outer};
}
void Recomputation::leave_block(int64_t outer) {
  while (!blocks_here.empty() && blocks_here.back().first != outer) blocks_here.pop_back();
}
int64_t Recomputation::current_block() {
  if (blocks_here.empty()) return 0;
  const auto [block, graph_task] = blocks_here.back();
  return graph_task == torch::autograd::get_current_graph_task_id() ? block : 0;
}

Tensor Recomputation::compute() {
  RecomputableNode& node = this->node();
  variable_list unpacked = node.unpack_saved();
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task != -1) {
    {
      const std::lock_guard lock(node.recompute_mutex_);
      node.unpacked_ = unpacked;
      node.unpacked_in_ = graph_task;
    }
    // The deleter runs when the graph task destroys the callback, also after an error.
    auto release = [held = node_, self = weak_from_this(), graph_task](void*) {
      auto& node = static_cast<RecomputableNode&>(*held);
      variable_list unpacked;
      {
        const std::lock_guard lock(node.recompute_mutex_);
        if (node.unpacked_in_ == graph_task) unpacked.swap(node.unpacked_);
      }
      if (const auto recomputation = self.lock()) recomputation->release(graph_task);
    };
    std::shared_ptr<void> at_end(this, std::move(release));
    torch::autograd::Engine::get_default_engine().queue_callback([at_end = std::move(at_end)] {});
  }
  return node.recompute(std::move(unpacked));
}

void Recomputation::release(int graph_task) {
  Tensor value;  // freed without the lock
  const std::lock_guard lock(mutex_);
  if (graph_task_ == graph_task) value = std::move(value_);
}

bool RecomputedOutput::is_recomputed(const Tensor& tensor, int64_t block) {
  const Tensor output = output_of(tensor);
  const RecomputableNode* node = node_of(output);
  return node != nullptr && node->is_recomputed_in(block, output);
}

std::unique_ptr<RecomputedOutput> RecomputedOutput::of(const Tensor& tensor) {
  const Tensor output = output_of(tensor);
  RecomputableNode& node = *node_of(output);
  std::shared_ptr<Recomputation> recomputation;
  {
    const std::lock_guard lock(node.recompute_mutex_);
    recomputation = node.recomputation_.lock();
    if (recomputation == nullptr) {
      if (node.references_ == 0) return nullptr;  // released meanwhile by another thread
      node.references_++;
      recomputation = std::make_shared<Recomputation>(output.grad_fn());
      node.recomputation_ = recomputation;
    }
  }
  return std::make_unique<RecomputedOutput>(std::move(recomputation), tensor);
}

RecomputedOutput::RecomputedOutput(std::shared_ptr<Recomputation> recomputation, const Tensor& tensor)
    : recomputation_(std::move(recomputation)), is_view_(tensor.is_view()) {
  if (is_view_) {
    sizes_ = tensor.sizes().vec(), strides_ = tensor.strides().vec(), offset_ = tensor.storage_offset();
  }
  const std::lock_guard lock(recomputation_->mutex_);
  recomputation_->users_++;
}

RecomputedOutput::~RecomputedOutput() {
  Tensor value;  // freed without the lock
  const std::lock_guard lock(recomputation_->mutex_);
  recomputation_->users_--;
  if (generation_ == recomputation_->generation_) recomputation_->served_--;
  if (recomputation_->served_ >= recomputation_->users_) value = std::move(recomputation_->value_);
}

Tensor RecomputedOutput::tensor() {
  Recomputation& shared = *recomputation_;
  const int graph_task = torch::autograd::get_current_graph_task_id();
  const auto take = [&] {
    Tensor value = shared.graph_task_ == graph_task ? shared.value_ : Tensor();
    if (!value.defined()) return value;
    if (std::exchange(generation_, shared.generation_) != shared.generation_) shared.served_++;
    if (shared.served_ >= shared.users_) shared.value_.reset();
    return value;
  };
  Tensor value;
  {
    const std::lock_guard lock(shared.mutex_);
    value = take();
  }
  if (!value.defined()) {
    value = shared.compute();
    if (graph_task != -1) {  // outside of a backward, nothing would free the value
      Tensor before;         // freed after the lock
      const std::lock_guard lock(shared.mutex_);
      before = std::exchange(shared.value_, value);
      shared.graph_task_ = graph_task;
      shared.generation_++, shared.served_ = 0;
      take();
    }
  }
  return is_view_ ? value.as_strided(sizes_, strides_, offset_) : value;
}

}  // namespace normops
