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

// Initializes the static variables that calls of an operator use: the dispatcher's handles and the names of arguments.
// If a process forks while another thread initializes one, the child's first call waits forever.
template <class Operator>
void initialize_statics() {
  op<Operator>(), op<Operator, Overload::out>();
  tensor_names<Operator>(), target_name<Operator, Overload::out>(0);
  if constexpr (Operator::kInplaceName != nullptr) {
    op<Operator, Overload::inplace>(), target_name<Operator, Overload::inplace>(0);
  }
}
template <class... Operators>
void initialize_statics(List<Operators...>) {
  (initialize_statics<Operators>(), ...);
}

#pragma GCC visibility push(default)  // for the Python module, which has static variables of its own
void initialize_statics_of_library();
#pragma GCC visibility pop

}  // namespace normops
