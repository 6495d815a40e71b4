#pragma once
#include "../python/registration.h"

namespace normops::triton {

// The operators with kernels in Triton, for a dispatch key.
python::Registration register_operators(const std::string& dispatch_key);

}  // namespace normops::triton
