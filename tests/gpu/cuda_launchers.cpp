// The CUDA kernels' launchers as C functions. Functions that return a string return an error message or null.
#include <string>

#include "launch_config.h"

namespace normops::cuda {
namespace {

template <class Function>
const char* message_of(Function function) {
  static std::string message;
  try {
    function();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

}  // namespace
}  // namespace normops::cuda

#pragma GCC visibility push(default)
extern "C" {

using namespace normops;
using namespace normops::cuda;

// Sizes of the structs that structures.py reads, in its order.
extern const int64_t structure_bytes[];
const int64_t structure_bytes[] = {sizeof(Rounding),   sizeof(Gating), sizeof(RowLayout),
                                   sizeof(RowsArg),    sizeof(Weight), sizeof(Rotation),
                                   sizeof(KernelArgs), sizeof(Device), sizeof(RowConfig)};

#define NORMOPS_FORWARD(name)                                           \
  const char* name(const KernelArgs* args, const Device* device) {      \
    return message_of([&] { launch_##name(*args, *device, nullptr); }); \
  }
#define NORMOPS_BACKWARD(name)                                                                                  \
  const char* name##_backward(const KernelArgs* args, void* (*allocate)(int64_t count), const Device* device) { \
    return message_of([&] { launch_##name##_backward(*args, *device, nullptr, allocate); });                    \
  }
NORMOPS_FORWARD(rms_norm)
NORMOPS_FORWARD(add_rms_norm)
NORMOPS_FORWARD(gated_rms_norm)
NORMOPS_FORWARD(rms_norm_rope)
NORMOPS_BACKWARD(rms_norm)
NORMOPS_BACKWARD(gated_rms_norm)
NORMOPS_BACKWARD(rms_norm_rope)

const char* grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, const Device* device) {
  return message_of(
      [&] { launch_grad_weight(dtype, weight_dtype, partials, count, cols, grad_weight, *device, nullptr); });
}

RowConfig forward_config_of(int64_t packs_of_row, const Device* device) { return row_config(packs_of_row, *device); }

RowConfig gated_config_of(int64_t packs_of_row, const Device* device) { return gated_config(packs_of_row, *device); }

RowConfig rope_config_of(int64_t slots_of_row, const Device* device) { return rope_config(slots_of_row, *device); }

RowConfig backward_config_of(int64_t packs_of_row, int64_t pack_elements, int64_t compute_bytes, const Device* device) {
  return backward_config(packs_of_row, pack_elements, compute_bytes, *device);
}

}  // extern "C"
#pragma GCC visibility pop
