// All operators.
#pragma once
#include "add_rms_norm.h"
#include "gated_rms_norm.h"
#include "overloads.h"
#include "rms_norm.h"

namespace normops {

using Operators = List<RmsNorm, RmsNormBackward, AddRmsNorm, GatedRmsNorm, GatedRmsNormBackward>;

}  // namespace normops
