// The CUDA kernels' launchers as functions of C. Those that return a string return null, or what went wrong.
#include <string>

#include "add_rms_norm.cu"
#include "gated_rms_norm.cu"
#include "gated_rms_norm_backward.cu"
#include "rms_norm.cu"
#include "rms_norm_backward.cu"
#include "rms_norm_rope.cu"
#include "rms_norm_rope_backward.cu"

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

// Of the structs that structures.py reads, in its order.
extern const int64_t structure_bytes[];
const int64_t structure_bytes[] = {sizeof(RowLayout),
                                   sizeof(Gating),
                                   sizeof(Casting),
                                   sizeof(Weight),
                                   sizeof(RmsNormArgs),
                                   sizeof(RmsNormBackwardArgs),
                                   sizeof(AddRmsNormArgs),
                                   sizeof(GatedRmsNormArgs),
                                   sizeof(GatedRmsNormBackwardArgs),
                                   sizeof(Rotation),
                                   sizeof(RmsNormRopeArgs),
                                   sizeof(RmsNormRopeBackwardArgs),
                                   sizeof(RmsNormStatsArgs),
                                   sizeof(RmsNormFromStatsArgs),
                                   sizeof(RmsNormBackwardStatsArgs),
                                   sizeof(RmsNormBackwardFromStatsArgs),
                                   sizeof(Device),
                                   sizeof(RowConfig)};

const char* rms_norm(const RmsNormArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm(*args, *device, nullptr); });
}

const char* add_rms_norm(const AddRmsNormArgs* args, const Device* device) {
  return message_of([&] { launch_add_rms_norm(*args, *device, nullptr); });
}

const char* gated_rms_norm(const GatedRmsNormArgs* args, const Device* device) {
  return message_of([&] { launch_gated_rms_norm(*args, *device, nullptr); });
}

const char* gated_rms_norm_backward(const GatedRmsNormBackwardArgs* args, const Device* device) {
  return message_of([&] { launch_gated_rms_norm_backward(*args, *device, nullptr); });
}

const char* rms_norm_rope(const RmsNormRopeArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_rope(*args, *device, nullptr); });
}

const char* rms_norm_rope_backward(const RmsNormRopeBackwardArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_rope_backward(*args, *device, nullptr); });
}

const char* rms_norm_stats(const RmsNormStatsArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_stats(*args, *device, nullptr); });
}

const char* rms_norm_from_stats(const RmsNormFromStatsArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_from_stats(*args, *device, nullptr); });
}

const char* rms_norm_backward_stats(const RmsNormBackwardStatsArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_backward_stats(*args, *device, nullptr); });
}

const char* rms_norm_backward_from_stats(const RmsNormBackwardFromStatsArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_backward_from_stats(*args, *device, nullptr); });
}

int64_t rope_partials(DType dtype, int64_t rows, int64_t cols, int64_t groups, const Rotation* rotation,
                      const Device* device) {
  return rms_norm_rope_backward_partials(dtype, rows, cols, groups, *rotation, *device);
}

int64_t gated_partials(DType dtype, int64_t rows, int64_t cols, int64_t groups, const Device* device) {
  return gated_rms_norm_backward_partials(dtype, rows, cols, groups, *device);
}

const char* rms_norm_backward(const RmsNormBackwardArgs* args, const Device* device) {
  return message_of([&] { launch_rms_norm_backward(*args, *device, nullptr); });
}

int64_t partials(DType dtype, DType grad_output_dtype, int64_t rows, int64_t cols, int64_t groups,
                 const Device* device) {
  return rms_norm_backward_partials(dtype, grad_output_dtype, rows, cols, groups, *device);
}

const char* grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight) {
  return message_of([&] { launch_grad_weight(dtype, weight_dtype, partials, count, cols, grad_weight, nullptr); });
}

RowConfig forward_config_of(int64_t packs_of_row, const Device* device) { return row_config(packs_of_row, *device); }

RowConfig gated_config_of(int64_t packs_of_row, const Device* device) { return gated_config(packs_of_row, *device); }

RowConfig rope_config_of(int64_t slots_of_row, const Device* device) { return rope_config(slots_of_row, *device); }

RowConfig backward_config_of(DType dtype, int64_t packs_of_row, const Device* device) {
  return dispatch(dtype, [&]<class T>() -> RowConfig {
    return backward_config(packs_of_row, kPack<T>, sizeof(compute_t<T>), *device);
  });
}

}  // extern "C"
#pragma GCC visibility pop
