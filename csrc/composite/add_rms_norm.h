// add_rms_norm written in ATen operators, which differentiate, see rms_norm.h.
#pragma once
#include "../add_rms_norm.h"

namespace normops {

std::tuple<Tensor, Tensor> composite(const AddRmsNorm& arguments);

}  // namespace normops
