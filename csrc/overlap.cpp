#include "overlap.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace normops {
namespace {

// Returns the address range [begin, end) of a tensor's elements; the tensor must not be empty.
std::pair<const char*, const char*> address_range(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.is_meta() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

Overlap overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!has_memory(a) || !has_memory(b) || a.numel() == 0 || b.numel() == 0) return Overlap::none;
  const auto [a_begin, a_end] = address_range(a);
  const auto [b_begin, b_end] = address_range(b);
  if (a_end <= b_begin || b_end <= a_begin) return Overlap::none;

  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), without those of size 1
  bool same = a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes();
  for (int64_t d = 0; same && d < a.dim(); d++) {
    if (a.size(d) == 1) continue;
    same = a.stride(d) == b.stride(d);
    dims.emplace_back(a.stride(d), a.size(d));
  }
  if (!same) return Overlap::partial;
  if (a_begin == b_begin) return Overlap::exact;

  // The tensors share an element if the distance between their first elements is a sum of d_i * stride_i with
  // |d_i| < size_i. With nested strides, each d_i is the quotient rounded down or up, as the smaller strides together
  // reach less than one stride.
  const int64_t bytes = std::abs(a_begin - b_begin);
  const auto element_size = static_cast<int64_t>(a.element_size());
  if (bytes % element_size != 0) return Overlap::partial;
  std::sort(dims.rbegin(), dims.rend());
  int64_t reach = 0;  // the largest distance over the dimensions with smaller strides
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i].first <= reach) return Overlap::partial;
    reach += dims[i].first * (dims[i].second - 1);
  }
  std::vector<int64_t> distances = {bytes / element_size};
  for (const auto& [stride, size] : dims) {
    std::vector<int64_t> rest;
    for (const int64_t distance : distances) {
      const int64_t steps = distance / stride;
      if (steps < size) rest.push_back(distance - steps * stride);
      if (steps + 1 < size) rest.push_back((steps + 1) * stride - distance);
    }
    std::sort(rest.begin(), rest.end());
    rest.erase(std::unique(rest.begin(), rest.end()), rest.end());
    distances = std::move(rest);
  }
  return std::find(distances.begin(), distances.end(), 0) != distances.end() ? Overlap::partial : Overlap::none;
}

}  // namespace normops
