// Where the rows of a tensor lie in memory. No torch header, so that kernels can include it.
#pragma once
#include <cstdint>

namespace normops {

// The dimensions before the normalized ones, outermost first, merged as far as their strides allow: of a contiguous
// tensor one is left, of a slice of a fused QKV projection two. Strides count bytes; an expanded dimension has stride
// 0.
struct RowLayout {
  static constexpr int kMaxDims = 8;
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

}  // namespace normops
