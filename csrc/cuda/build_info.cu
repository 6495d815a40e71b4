#include "build_info.h"

#include <cuda_runtime_api.h>

namespace normops::cuda {

std::vector<std::string> compiled_archs() {
  // Uses the build's list, as nvcc's list has the PTX versions that code is compiled from.
  std::vector<std::string> archs;
  for (const int arch : {NORMOPS_CUDA_ARCHS}) archs.push_back(std::to_string(arch));
  return archs;
}

std::string compiled_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace normops::cuda
