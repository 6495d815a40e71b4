#include "recompute.h"

namespace normops {

static thread_local bool is_enabled_here = false;

bool Recomputation::enable(bool enabled) { return std::exchange(is_enabled_here, enabled); }
bool Recomputation::is_enabled() { return is_enabled_here; }

std::shared_ptr<Recomputation> Recomputation::of(const Tensor& tensor) {
  if (!tensor.requires_grad() || tensor._version() != 0) return nullptr;
  const bool is_view = tensor.is_view();
  const Tensor output = is_view ? Tensor(tensor._base()) : tensor;
  auto* node = dynamic_cast<RecomputableNode*>(output.grad_fn().get());
  if (node == nullptr || !node->can_recompute_ || node->is_released_ || output.output_nr() != 0) return nullptr;
  // Of such views more is to be known than how they lie in memory.
  if (is_view && (tensor.scalar_type() != output.scalar_type() || tensor.is_neg() || tensor.is_conj() ||
                  tensor.key_set().has(c10::DispatchKey::Python))) {
    return nullptr;
  }
  auto recomputation = node->recomputation_.lock();
  if (recomputation == nullptr) {
    recomputation = std::make_shared<Recomputation>(output.grad_fn());
    node->recomputation_ = recomputation;
  }
  return recomputation;
}

}  // namespace normops
