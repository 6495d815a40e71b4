// Conversions, and packs: 16 bytes of a row, the most that one instruction loads or stores. Other rows of a narrower
// type are accessed in packs of as many elements.
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

// The same for a number of another compute type. It is rounded to odd in float32 first, so that the two steps round
// like one.
template <class T, class Number>
__device__ T from_number(Number number) {
  auto result = static_cast<compute_t<T>>(number);
  if constexpr (sizeof(T) == 2 && sizeof(Number) == 8) {
    if (result != number) {
      unsigned bits = __float_as_uint(result);
      if ((result > number) == (number > 0)) bits--;  // it was rounded away from zero
      result = __uint_as_float(bits | 1);
    }
  }
  return from_compute<T>(result);
}

// Packs two 16-bit elements into one register, as loads do. If they were unpacked too early, each would take a whole
// register.
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

// The number of elements of a pack.
template <class T>
constexpr int kPack = 16 / sizeof(T);

// float64 is for checks, and only has kernels for rows of any width.
template <class T>
constexpr bool kIsHeld = !std::is_same_v<T, double>;

// Returns the number of packs of a row, or more than any held row has.
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

  // Takes one instruction for each element, as bfloat16 is the upper half of float32.
  __device__ compute_t<W> number(int i) const {
    if constexpr (std::is_same_v<W, bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else if constexpr (std::is_same_v<W, float16>) {
      return __half2float(__ushort_as_half(element(i).bits));
    } else {
      return words[i];
    }
  }

  // Requires that the element was zero.
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

// The type of one access to kBytes bytes that are aligned to 16 bytes, or to kBytes if that is less.
template <int kBytes>
using Aligned = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;

// Loads the elements at `source`, `count` of which are inside the row; the others are zero. `aligned` means that all or
// none are inside, and that they are aligned to 16 bytes, or to their total size if that is less.
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

// Numbers need no conversion.
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

// Rounds to T, if `is_wanted` and if T has 16 bits. `is_wanted` is the same for all threads.
template <class T, class R>
__device__ void round_if(Numbers<R>& numbers, bool is_wanted) {
  if constexpr (sizeof(T) == 2) {
    if (is_wanted) {
      compiler_barrier();  // makes the compiler jump over the conversions, instead of choosing between the results
      numbers = to_compute<R>(from_compute<T>(numbers));
    }
  }
}

// Returns weight + offset for a pack of T, or ones without a weight. The weight's dtype is the same for all threads, so
// the dispatch costs a jump, not a kernel for each pair of dtypes.
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
      // This case is rare, and not worth the registers of a whole pack at once.
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
