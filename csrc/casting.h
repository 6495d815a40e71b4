// Where a norm rounds on its way, as its kernels see it.
#pragma once
#include <optional>
#include <string_view>

namespace normops {

// Which results are rounded to the dtype of the output besides the last one. A backward rounds where autograd would,
// with tensors of that dtype: those results, where it forms them again, and their gradients.
struct Casting {
  bool normalized;  // the normalized input, before it is multiplied by the weight
  bool multiplied;  // the product with the weight, before it is gated or rotated; alpha * input, before it is added

  constexpr bool any() const { return normalized || multiplied; }
};

constexpr std::string_view kNoCasting = "gemma";

std::optional<Casting> find_casting(std::string_view casting_mode);

}  // namespace normops
