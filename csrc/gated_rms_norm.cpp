#include "gated_rms_norm.h"

namespace normops {

Activation find_activation(const char* op, std::string_view name) {
  if (name == "silu" || name == "swish") return Activation::silu;
  TORCH_CHECK(name == "sigmoid", op, ": expected activation to be \"silu\", \"swish\" or \"sigmoid\", but got \"", name,
              "\"");
  return Activation::sigmoid;
}

}  // namespace normops
