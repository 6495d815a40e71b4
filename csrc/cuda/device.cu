#include <vector>

#include "cluster.cuh"
#include "rms_norm_launch.h"

namespace normops::cuda {
namespace {

__global__ void any_kernel() {}

// Whether the current device runs code of sm_90 or later: on a GPU newer than all that was compiled for, the driver
// compiles what was written for an older one. All kernels are compiled for the same architectures.
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

// Blocks of the largest cluster that the device runs: a part of a GPU may have no room for large ones. Asked of blocks
// that have a multiprocessor to themselves.
int largest_cluster(int multiprocessors, int64_t shared_bytes) {
  for (int blocks = kMostBlocksOfCluster; blocks > 1; blocks /= 2) {
    const LaunchShape shape = {dim3(1, blocks), dim3(512), shared_bytes};
    try {
      if (clusters_at_once(any_kernel, shape, multiprocessors) > 0) return blocks;
    } catch (const std::runtime_error&) {  // no device of its kind runs them
      cudaGetLastError();                  // which keeps the error else
    }
  }
  return 1;
}

Device describe(int device) {
  int current = 0;
  check(cudaGetDevice(&current));
  check(cudaSetDevice(device));
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const bool is_sm_90 = attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 && runs_code_of_sm_90();
  const Device described = {multiprocessors, shared_bytes,
                            is_sm_90 ? largest_cluster(multiprocessors, shared_bytes) : 1, is_sm_90};
  check(cudaSetDevice(current));
  return described;
}

std::vector<Device> all_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count));
  std::vector<Device> devices;
  for (int device = 0; device < count; device++) devices.push_back(describe(device));
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
