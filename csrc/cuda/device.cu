#include "platform.cuh"
#include "rms_norm_launch.h"

namespace normops::cuda {

Device current_device() {
  int device = 0, multiprocessors = 0, shared_bytes = 0, major = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return {multiprocessors, shared_bytes, major >= 9};
}

}  // namespace normops::cuda
