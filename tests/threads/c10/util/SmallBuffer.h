#pragma once
#include <cstddef>
#include <vector>

namespace c10 {

template <class T, size_t kSmall>
using SmallBuffer = std::vector<T>;

}  // namespace c10
