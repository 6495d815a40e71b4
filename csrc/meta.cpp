// Computes only shapes, dtypes and strides: fake tensors, torch.export and device="meta" run these kernels.
#include "operators.h"

#include <ATen/ops/empty.h>

namespace normops {
namespace {

struct Meta {
  template <class Operator>
  static Outputs<Operator> functional(c10::DispatchKeySet, const Operator& arguments) {
    check<Overload::functional>(arguments);
    return new_outputs(arguments,
                       [](const OutputSpec& like) { return at::empty_symint(like.sym_sizes(), like.options()); });
  }

  template <Overload overload, class Operator>
  static void write(c10::DispatchKeySet, const Operator& arguments, const Targets<Operator>& targets) {
    check_write<overload>(arguments, targets);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(normops, Meta, m) { register_all<Meta>(m, Operators()); }

}  // namespace normops
