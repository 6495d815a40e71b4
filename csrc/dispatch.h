// The element types of normops, listed only here. Includes no torch header, so that kernels can include it.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

namespace normops {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

enum class DType : uint8_t { float16, bfloat16, float32, float64 };

template <class T>
constexpr DType kDType = std::is_same_v<T, float16>    ? DType::float16
                         : std::is_same_v<T, bfloat16> ? DType::bfloat16
                         : std::is_same_v<T, float>    ? DType::float32
                                                       : DType::float64;

// Calls `function.template operator()<T>()` with the C++ type of `dtype`.
template <class Function>
constexpr decltype(auto) dispatch(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::float16:
      return std::forward<Function>(function).template operator()<float16>();
    case DType::bfloat16:
      return std::forward<Function>(function).template operator()<bfloat16>();
    case DType::float32:
      return std::forward<Function>(function).template operator()<float>();
    case DType::float64:
      break;
  }
  return std::forward<Function>(function).template operator()<double>();
}

// The type in which everything between load and store is computed.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls `function.template operator()<T, R>()` for a pair of dtypes that operators can combine: equal ones, or 16 bits
// with float32.
template <class Function>
constexpr decltype(auto) dispatch_pair(DType dtype, DType wider_dtype, Function&& function) {
  return dispatch(dtype, [&]<class T>() -> decltype(auto) {
    if constexpr (sizeof(T) == 2) {
      if (wider_dtype == DType::float32) return std::forward<Function>(function).template operator()<T, float>();
    }
    return std::forward<Function>(function).template operator()<T, T>();
  });
}

// Calls `function.template operator()<W>()` with the C++ type of `dtype`, which can be combined with T: T itself,
// float32 if T has 16 bits, or 16 bits if T is float32.
template <class T, class Function>
constexpr decltype(auto) dispatch_beside(DType dtype, Function&& function) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::float32) return std::forward<Function>(function).template operator()<float>();
  } else if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::float16) return std::forward<Function>(function).template operator()<float16>();
    if (dtype == DType::bfloat16) return std::forward<Function>(function).template operator()<bfloat16>();
  }
  return std::forward<Function>(function).template operator()<T>();
}

constexpr bool may_be_beside(DType dtype, DType other) {
  return dispatch(dtype, [other]<class T>() {
    return dispatch_beside<T>(other, [other]<class W>() { return kDType<W> == other; });
  });
}

constexpr int64_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

constexpr DType compute_dtype(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

}  // namespace normops
