#include <cstdlib>
#include <string_view>

#include "cluster.cuh"
#include "kernels.h"

namespace normops::cuda {
namespace {

__global__ void any_kernel() {}

// Returns whether the current device runs code of sm_90 or later: for a GPU newer than all architectures of the build,
// the driver compiles the PTX of an older one. All kernels are compiled for the same architectures.
bool runs_code_of_sm_90() {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, any_kernel));
  return attributes.ptxVersion >= 90;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

// Returns the number of blocks of the largest cluster that the device runs, as a part of a GPU may have no room for
// large ones. Queries CUDA for blocks that each occupy a whole multiprocessor.
int largest_cluster(int multiprocessors, int64_t shared_bytes) {
  for (int blocks = kMostBlocksOfCluster; blocks > 1; blocks /= 2) {
    const LaunchShape shape = {dim3(1, blocks), dim3(512), shared_bytes};
    try {
      if (clusters_at_once(any_kernel, shape, multiprocessors) > 0) return blocks;
    } catch (const std::runtime_error&) {  // no device of this kind runs such clusters
      cudaGetLastError();                  // clears the error, which the next call would return otherwise
    }
  }
  return 1;
}

// Programmatic dependent launches are used only on architectures that are known to capture them into graphs: sm_120
// refused (sglang#18596).
bool uses_pdl(int major) {
  static const bool is_wanted = [] {
    const char* setting = std::getenv("NORMOPS_EARLY_START");
    return setting == nullptr || std::string_view(setting) != "0";
  }();
  return is_wanted && (major == 9 || major == 10);
}

// Returns the properties of the current device. Querying another one would create a context in its memory.
Device describe(int device) {
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const bool is_sm_90 = major >= 9 && runs_code_of_sm_90();
  return {multiprocessors, shared_bytes, is_sm_90 ? largest_cluster(multiprocessors, shared_bytes) : 1,
          is_sm_90 && uses_pdl(major)};
}

}  // namespace

Device current_device() {
  static PerKeyCache<int, Device> devices;  // cached, as every call of an operator needs it
  const int device = current_device_index();
  return devices(device, [&] { return describe(device); });
}

}  // namespace normops::cuda
