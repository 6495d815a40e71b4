// aten::rms_norm, which F.rms_norm and torch.nn.RMSNorm call, as a call of normops::rms_norm.
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>

#include <cmath>

#include "../problem.h"
#include "../rms_norm.h"
#include "registration.h"

namespace normops::python {
namespace {

bool has_kernels_for(const Tensor& tensor) {
  return find_dtype(tensor.scalar_type()).has_value() && tensor.layout() == at::kStrided &&
         (tensor.is_cpu() || tensor.is_cuda());
}

// What torch's own may take and ours does not is torch's: it computes, or refuses in its own words.
Tensor rms_norm_of_torch(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         std::optional<double> eps) {
  // torch's has no weight per group.
  const bool has_our_weight =
      !is_given(weight) || (has_kernels_for(*weight) && weight->dim() == static_cast<int64_t>(normalized_shape.size()));
  const bool is_ours = has_kernels_for(input) && has_our_weight && !(eps.has_value() && std::isnan(*eps));
  if (!is_ours) return at::compositeimplicitautograd::rms_norm_symint(input, normalized_shape, weight, eps);
  return rms_norm_op().call(input, normalized_shape, weight, eps, 0.0);
}

}  // namespace

Registration override_torch() {
  return register_kernels("aten", c10::DispatchKey::CompositeImplicitAutograd,
                          [](torch::Library& library) { library.impl("rms_norm", TORCH_FN(rms_norm_of_torch)); });
}

}  // namespace normops::python
