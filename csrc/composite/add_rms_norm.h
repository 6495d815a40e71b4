// add_rms_norm written in ATen operators, which differentiate, see rms_norm.h.
#pragma once
#include "../add_rms_norm.h"

namespace normops {

AddRmsNorm add_rms_norm_composite;

}  // namespace normops
