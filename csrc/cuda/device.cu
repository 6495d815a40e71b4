#include <vector>

#include "platform.cuh"
#include "rms_norm_launch.h"

namespace normops::cuda {
namespace {

__global__ void any_kernel() {}

// Whether the device runs code that was compiled for clusters: on a GPU newer than all that was compiled for, the
// driver compiles what was written for an older one. All kernels are compiled for the same architectures.
bool runs_cluster_code(int device) {
  int current = 0;
  check(cudaGetDevice(&current));
  check(cudaSetDevice(device));
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, any_kernel));
  check(cudaSetDevice(current));
  return attributes.ptxVersion >= 90;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

std::vector<Device> all_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count));
  std::vector<Device> devices;
  for (int device = 0; device < count; device++) {
    devices.push_back({attribute(cudaDevAttrMultiProcessorCount, device),
                       attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                       attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 && runs_cluster_code(device)});
  }
  return devices;
}

}  // namespace

Device current_device() {
  static const std::vector<Device> devices = all_devices();  // asked once: every call of an operator needs it
  int device = 0;
  check(cudaGetDevice(&device));
  return devices.at(device);
}

}  // namespace normops::cuda
