// Bumps the version counters of written tensors, also in inference mode. A backward compares them to detect that a
// saved tensor was modified.
#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

namespace normops {
namespace {

struct CountedWrite {
  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet keys, const Operator& arguments, const Targets<Operator>& targets) {
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      redispatch<overload>(keys & c10::after_ADInplaceOrView_keyset, arguments, targets);
    }
    const Like<Operator> like = arguments.like();
    for (size_t i = 0; i < targets.size(); i++) {
      if (like[i].is_wanted()) torch::autograd::impl::bump_version(*targets[i]);
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, ADInplaceOrView, m) { register_writes<CountedWrite>(m, Operators()); }

}  // namespace normops
