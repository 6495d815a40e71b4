// Conversions, and packs: 16 bytes of a row, the most that one instruction loads or stores. A row of a narrower type
// beside it is accessed in packs of as many elements.
#pragma once
#include <cstring>
#include <type_traits>

#include "../dispatch.h"
#include "platform.cuh"

namespace normops::cuda {

template <class Compute>
__device__ Compute fma_rn(Compute a, Compute b, Compute c) {
  if constexpr (std::is_same_v<Compute, double>) {
    return __fma_rn(a, b, c);
  } else {
    return __fmaf_rn(a, b, c);
  }
}

template <class T>
__device__ T from_compute(compute_t<T> value) {
  if constexpr (std::is_same_v<T, float16>) {
    return {__half_as_ushort(__float2half_rn(value))};
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  } else {
    return value;
  }
}

// The same of a number of another compute type, which is rounded once. (An odd last bit tells on which side of a float
// it lies.)
template <class T, class Number>
__device__ T from_number(Number number) {
  auto result = static_cast<compute_t<T>>(number);
  if constexpr (sizeof(T) == 2 && sizeof(Number) == 8) {
    if (result != number) {
      unsigned bits = __float_as_uint(result);
      if ((result > number) == (number > 0)) bits--;  // away from zero
      result = __uint_as_float(bits | 1);
    }
  }
  return from_compute<T>(result);
}

// Two 16-bit elements in one register, as a load leaves them. If they were taken apart too early, each would take a
// register of its own.
template <class T>
__device__ unsigned pair_from_compute(float low, float high) {
  unsigned pair;
  if constexpr (std::is_same_v<T, float16>) {
    const __half2 halves = __floats2half2_rn(low, high);
    std::memcpy(&pair, &halves, sizeof pair);
  } else {
    const __nv_bfloat162 halves = __floats2bfloat162_rn(low, high);
    std::memcpy(&pair, &halves, sizeof pair);
  }
  return pair;
}

// How many elements a pack has.
template <class T>
constexpr int kPack = 16 / sizeof(T);

// float64 is for checks, and has kernels for rows of any width alone.
template <class T>
constexpr bool kIsHeld = !std::is_same_v<T, double>;

// How many packs a row has, or more than any row that is held.
template <class T>
int64_t packs_of(int64_t cols) {
  return kIsHeld<T> ? (cols + kPack<T> - 1) / kPack<T> : INT64_MAX;
}

template <class W, int kCount>
struct Elements {
  static constexpr bool kPairs = sizeof(W) == 2;
  using Word = std::conditional_t<kPairs, unsigned, W>;
  static constexpr int kWords = kPairs ? kCount / 2 : kCount;

  Word words[kWords];

  __device__ W element(int i) const {
    if constexpr (kPairs) {
      return {static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))};
    } else {
      return words[i];
    }
  }

  // One instruction for each, as bfloat16 is the upper half of float32.
  __device__ compute_t<W> number(int i) const {
    if constexpr (std::is_same_v<W, bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else if constexpr (std::is_same_v<W, float16>) {
      return __half2float(__ushort_as_half(element(i).bits));
    } else {
      return words[i];
    }
  }

  // For elements that were zero.
  __device__ void set(int i, W value) {
    if constexpr (kPairs) {
      words[i / 2] |= static_cast<unsigned>(value.bits) << (i % 2 * 16);
    } else {
      words[i] = value;
    }
  }
};

template <class T>
using Pack = Elements<T, kPack<T>>;

// Numbers of the compute type for the elements of a pack of T.
template <class T>
struct Numbers {
  compute_t<T> element[kPack<T>];
};

// What one instruction accesses of kBytes that lie on a multiple of 16, or of kBytes if that is less.
template <int kBytes>
using Aligned = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;

// The elements at `source`, `count` of which are inside the row; the others are read as zero. `aligned` says that all
// are, and that they lie on a multiple of 16 bytes, or of their own size if that is less.
template <class W, int kCount, class Index>
__device__ Elements<W, kCount> load_elements(const W* source, Index count, bool aligned) {
  Elements<W, kCount> elements = {};
  if (aligned) {
    using Word = Aligned<sizeof elements>;
    constexpr int kWords = sizeof elements / sizeof(Word);
    if (count > 0) {
      Word words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; i++) words[i] = reinterpret_cast<const Word*>(source)[i];
      std::memcpy(&elements, words, sizeof elements);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (i < count) elements.set(i, source[i]);
    }
  }
  return elements;
}

template <class W, int kCount, class Index>
__device__ void store_elements(W* target, const Elements<W, kCount>& elements, Index count, bool aligned) {
  if (aligned) {
    using Word = Aligned<sizeof elements>;
    constexpr int kWords = sizeof elements / sizeof(Word);
    Word words[kWords];
    std::memcpy(words, &elements, sizeof words);
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < kWords; i++) reinterpret_cast<Word*>(target)[i] = words[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (i < count) target[i] = elements.element(i);
    }
  }
}

// Conversions between numbers of R and as many elements of T, which may be narrower.
template <class R, class T>
__device__ Numbers<R> to_compute(const Elements<T, kPack<R>>& elements) {
  Numbers<R> numbers;
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) numbers.element[i] = elements.number(i);
  return numbers;
}

// What has been computed is of no other type.
template <class R>
__device__ Numbers<R> to_compute(const Numbers<R>& numbers) {
  return numbers;
}

template <class T, class R>
__device__ Elements<T, kPack<R>> from_compute(const Numbers<R>& numbers) {
  using Result = Elements<T, kPack<R>>;
  Result elements;
#pragma unroll
  for (int i = 0; i < Result::kWords; i++) {
    if constexpr (Result::kPairs) {
      elements.words[i] = pair_from_compute<T>(numbers.element[2 * i], numbers.element[2 * i + 1]);
    } else {
      elements.words[i] = numbers.element[i];
    }
  }
  return elements;
}

// Rounded to T, where that is asked for and T has 16 bits. A kernel is told so for all of its threads.
template <class T, class R>
__device__ void cast(Numbers<R>& numbers, bool is_wanted) {
  if constexpr (sizeof(T) == 2) {
    if (is_wanted) {
      compiler_barrier();  // makes the compiler jump over the conversions, instead of choosing between the results
      numbers = to_compute<R>(from_compute<T>(numbers));
    }
  }
}

// weight + offset for a pack of T, or ones without a weight. The weight's dtype is the same for all threads, so that
// the choice costs a jump, not a kernel for each pair of dtypes.
template <class T, class Index>
__device__ Numbers<T> load_scale(const void* weight, DType weight_dtype, compute_t<T> offset, Index column, Index count,
                                 bool aligned) {
  Numbers<T> scale;
  if (weight == nullptr) {
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) scale.element[i] = 1;
    return scale;
  }
  dispatch(weight_dtype, [&]<class W>() {
    const W* const source = static_cast<const W*>(weight) + column;
    if constexpr (sizeof(W) > sizeof(compute_t<T>)) {
      // Rare, and not worth the registers of a whole pack at once.
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) {
        scale.element[i] = i < count ? static_cast<compute_t<T>>(source[i]) : 0;
        compiler_barrier();
      }
    } else {
      const auto elements = load_elements<W, kPack<T>>(source, count, aligned);
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) {
        scale.element[i] = static_cast<compute_t<T>>(elements.number(i));
      }
    }
  });
  if (offset != 0) {
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) scale.element[i] += offset;
  }
  return scale;
}

}  // namespace normops::cuda
