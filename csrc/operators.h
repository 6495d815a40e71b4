// All operators.
#pragma once
#include "add_rms_norm.h"
#include "channel_rms_norm.h"
#include "gated_rms_norm.h"
#include "overloads.h"
#include "rms_norm.h"
#include "rms_norm_rope.h"
#include "rms_norm_stats.h"

namespace normops {

// Operators on rows, with kernels on every device.
using RowOperators =
    List<RmsNorm, RmsNormBackward, AddRmsNorm, GatedRmsNorm, GatedRmsNormBackward, RmsNormRope, RmsNormRopeBackward,
         RmsNormStats, RmsNormFromStats, RmsNormBackwardStats, RmsNormBackwardFromStats>;
using ChannelOperators = List<ChannelRmsNorm, ChannelRmsNormBackward>;
using Operators = Joined<RowOperators, ChannelOperators>;

}  // namespace normops
