// The architectures and the CUDA version that this build supports. Includes no torch header.
#pragma once
#include <string>
#include <vector>

namespace normops::cuda {

[[gnu::visibility("default")]] std::vector<std::string> compiled_archs();  // e.g. {"80", "90"}
[[gnu::visibility("default")]] std::string compiled_version();             // the toolkit's, e.g. "13.0"

}  // namespace normops::cuda
