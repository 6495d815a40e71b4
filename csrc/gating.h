// How gated_rms_norm gates, as its kernels see it.
#pragma once
#include <cstdint>

namespace normops {

enum class Activation : uint8_t { silu, sigmoid };

struct Gating {
  Activation activation;
  bool norm_before_gate;
};

}  // namespace normops
