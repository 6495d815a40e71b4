// All operators.
#pragma once
#include "add_rms_norm.h"
#include "gated_rms_norm.h"
#include "overloads.h"
#include "rms_norm.h"
#include "rms_norm_rope.h"
#include "rms_norm_stats.h"

namespace normops {

using Operators =
    List<RmsNorm, RmsNormBackward, AddRmsNorm, GatedRmsNorm, GatedRmsNormBackward, RmsNormRope, RmsNormRopeBackward,
         RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>;

}  // namespace normops
