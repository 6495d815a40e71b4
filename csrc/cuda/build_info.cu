#include "build_info.h"

#include <cuda_runtime_api.h>

namespace normops::cuda {

std::vector<std::string> compiled_archs() {
  // nvcc defines the list in tens: 800,900 for sm_80 and sm_90.
  std::vector<std::string> archs;
  for (const int arch : {__CUDA_ARCH_LIST__}) archs.push_back(std::to_string(arch / 10));
  return archs;
}

std::string compiled_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace normops::cuda
