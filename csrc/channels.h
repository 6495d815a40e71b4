// The layout of the tensors of the channel operators. Includes no torch header.
#pragma once
#include "kernel_args.h"

namespace normops {

// The layout of tensors [samples, channels, positions] whose channels are normalized. A row is a position, and the rows
// of a sample are consecutive.
struct Channels {
  DType dtype;
  int64_t positions;
  int64_t sample_strides[kTensorCount], channel_strides[kTensorCount];  // in bytes
  bool is_activated;                                                    // whether gating.activation follows the bias
};

}  // namespace normops
