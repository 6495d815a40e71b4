#include "build_info.h"

#include <cuda_runtime_api.h>

namespace normops::cuda {

std::vector<std::string> compiled_archs() {
  // The build's own list: nvcc's is of the PTX that code is made from.
  std::vector<std::string> archs;
  for (const int arch : {NORMOPS_CUDA_ARCHS}) archs.push_back(std::to_string(arch));
  return archs;
}

std::string compiled_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace normops::cuda
