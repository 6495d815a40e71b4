#include <vector>

#include "platform.cuh"
#include "rms_norm_launch.h"

namespace normops::cuda {
namespace {

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
                       attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9});
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
