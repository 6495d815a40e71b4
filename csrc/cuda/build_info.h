// What the CUDA part of this build was made for. No torch header.
#pragma once
#include <string>
#include <vector>

namespace normops::cuda {

std::vector<std::string> compiled_archs();  // e.g. {"80", "90"}
std::string compiled_version();             // the toolkit's, e.g. "13.0"

}  // namespace normops::cuda
