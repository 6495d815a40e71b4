// Loads, stores and sums blocks of a row in the compute type. Included once per instruction set, like simd.h.
//
// A block is 64 bytes of the compute type, 16 floats or 8 doubles, in 4, 2 or 1 registers. All kernels process rows in
// blocks of this size; the longer bfloat16 block of AVX-512 counts as two. Sums have the same order everywhere: all
// instruction sets give the same bits.
#include "simd.h"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Widening 16-bit lanes costs a shuffle per register, and x86 has few ports for those. For bfloat16 it is cheaper to
// take the even elements of a block into its first register and the odd ones into its second. On AVX-512 this makes a
// block of 32 elements.
template <class R>
constexpr bool kEvenOdd = std::is_same_v<R, bfloat16> && NORMOPS_VECTOR_BYTES >= 32;

// A block of a row of R, in the order in which R is packed.
template <class R>
struct Block {
  using vector = std::conditional_t<std::is_same_v<R, double>, f64_vector, f32_vector>;
  static constexpr int kVectors = kEvenOdd<R> ? 2 : 64 / NORMOPS_VECTOR_BYTES;
  static constexpr int kVectorLanes = NORMOPS_VECTOR_BYTES / sizeof(compute_t<R>);
  vector v[kVectors];
};

template <class R>
constexpr int kLanes = Block<R>::kVectors * Block<R>::kVectorLanes;

// The types of most calls. Other types get less code: one instance branches between several cases at run time.
template <class T>
constexpr bool kHasFastPath = std::is_same_v<T, float> || std::is_same_v<T, bfloat16>;

// The part of a block that is inside the row. Lanes outside the row are read as zero, and are not written.
struct FullBlock {};
struct PartialBlock {
  int64_t lanes;
};

// Calls visit(choice) with std::true_type or std::false_type, so that code is compiled for either. Without kStatic it
// passes the bool itself, for less code.
template <bool kStatic, class Visit>
NORMOPS_INLINE void dispatch_bool(bool choice, Visit visit) {
  if constexpr (!kStatic) {
    visit(choice);
  } else if (choice) {
    visit(std::true_type{});
  } else {
    visit(std::false_type{});
  }
}

// Store policies: regular (Cached), non-temporal (NonTemporal), or a bool that selects at run time (true:
// non-temporal). Non-temporal stores require targets aligned to the size of the store, and finish_non_temporal() after
// the last one.
using Cached = std::false_type;
using NonTemporal = std::true_type;

template <class Bits, class StorePolicy>
NORMOPS_INLINE void write(void* target, const Bits& bits, [[maybe_unused]] StorePolicy non_temporal) {
#if defined(__x86_64__)
  if (non_temporal) {
    if constexpr (sizeof bits == 16) return _mm_stream_si128(static_cast<__m128i*>(target), bit_cast<__m128i>(bits));
#if NORMOPS_VECTOR_BYTES >= 32
    if constexpr (sizeof bits == 32) {
      return _mm256_stream_si256(static_cast<__m256i*>(target), bit_cast<__m256i>(bits));
    }
#endif
#if NORMOPS_VECTOR_BYTES == 64
    if constexpr (sizeof bits == 64) {
      return _mm512_stream_si512(static_cast<__m512i*>(target), bit_cast<__m512i>(bits));
    }
#endif
  }
#endif
  std::memcpy(target, &bits, sizeof bits);
}

NORMOPS_INLINE void finish_non_temporal() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Prefetches into the second-level cache.
NORMOPS_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
// Returns a mask of the first `count` of 64 bytes, for count < 64.
NORMOPS_INLINE __mmask64 mask_of_bytes(uint64_t count) { return (uint64_t{1} << count) - 1; }
#endif

// Copies `bytes` bytes, fewer than 2 * kBytes, in powers of two: a call of memcpy would spill all vector registers.
template <int kBytes>
NORMOPS_INLINE void copy_part(char* target, const char* source, int64_t bytes) {
  if ((bytes & kBytes) != 0) std::memcpy(target, source, kBytes);
  if constexpr (kBytes > 2) {
    const int64_t done = bytes & kBytes;
    copy_part<kBytes / 2>(target + done, source + done, bytes);
  }
}

// Loads the first `count` elements of a block, and sets the rest to zero.
template <class T, int kCount>
NORMOPS_INLINE void load_part(T (&lanes)[kCount], const T* source, int64_t count) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  if constexpr (sizeof lanes == 64) {
    const __m512i bits = _mm512_maskz_loadu_epi8(mask_of_bytes(count * sizeof(T)), source);
    std::memcpy(lanes, &bits, sizeof bits);
    return;
  }
#elif defined(NORMOPS_F16C)
  // Stores whole registers to `lanes`: loading a register that was stored in parts stalls.
  if constexpr (sizeof lanes % 32 == 0) {
    const int words = static_cast<int>(count * sizeof(T) / 4);
    for (int i = 0; i < static_cast<int>(sizeof lanes) / 32; i++) {
      const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * i));
      const __m256i end = _mm256_set1_epi32(words);
      __m256i bits = _mm256_maskload_epi32(reinterpret_cast<const int*>(source) + 8 * i, _mm256_cmpgt_epi32(end, lane));
      if (sizeof(T) == 2 && count % 2 != 0) {
        uint16_t last;
        std::memcpy(&last, source + count - 1, sizeof last);
        bits = _mm256_or_si256(bits, _mm256_and_si256(_mm256_cmpeq_epi32(end, lane), _mm256_set1_epi32(last)));
      }
      std::memcpy(reinterpret_cast<char*>(lanes) + 32 * i, &bits, sizeof bits);
    }
    return;
  }
#endif
  std::memset(lanes, 0, sizeof lanes);
  copy_part<sizeof lanes / 2>(reinterpret_cast<char*>(lanes), reinterpret_cast<const char*>(source),
                              count * static_cast<int64_t>(sizeof(T)));
}

// Loads a register of elements of T, in memory order.
template <class T>
NORMOPS_INLINE auto load_register(const T* source) {
  if constexpr (std::is_same_v<T, float16>) {
    return float16_to_float(load_vector<u16_vector>(source));
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return bit_cast<f32_vector>(widen(load_vector<u16_vector>(source)) << 16);
  } else {
    return load_vector<typename Block<T>::vector>(source);
  }
}

template <class T, class StorePolicy>
NORMOPS_INLINE void store_register(T* target, const typename Block<T>::vector& v, StorePolicy way) {
  if constexpr (std::is_same_v<T, float16>) {
    write(target, float_to_float16(v), way);
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    write(target, narrow(round_to_bfloat16(v) >> 16), way);
  } else {
    write(target, v, way);
  }
}

using RegisterLanes = std::make_integer_sequence<int, NORMOPS_VECTOR_BYTES / 4>;

// Splits a pair of registers into its even and its odd lanes.
template <int... kLane>
NORMOPS_INLINE Block<bfloat16> separate(f32_vector low, f32_vector high, std::integer_sequence<int, kLane...>) {
  return {shuffle<2 * kLane...>(low, high), shuffle<2 * kLane + 1 ...>(low, high)};
}

// Inverts separate(): returns a register of elements in memory order, from element kFirst of the block.
template <int kFirst, int... kLane>
NORMOPS_INLINE f32_vector interleave(const Block<bfloat16>& block, std::integer_sequence<int, kLane...>) {
  return shuffle<(kFirst + kLane) / 2 + kLane % 2 * static_cast<int>(sizeof...(kLane))...>(block.v[0], block.v[1]);
}

template <class R>
NORMOPS_INLINE Block<R> broadcast(compute_t<R> value) {
  Block<R> block;
  for (auto& v : block.v) v = value - typename Block<R>::vector{};  // keeps the sign of a zero
  return block;
}

// Replaces every NaN by the one of std::numeric_limits.
template <class R>
NORMOPS_INLINE Block<R> canonical_nans(const Block<R>& block) {
  Block<R> result = broadcast<R>(std::numeric_limits<compute_t<R>>::quiet_NaN());
  for (int i = 0; i < block.kVectors; i++) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
    // One instruction instead of GCC 12's two: only quiet and signaling NaNs are replaced.
    if constexpr (std::is_same_v<compute_t<R>, float>) {
      result.v[i] = _mm512_fixupimm_ps(result.v[i], block.v[i], _mm512_set1_epi32(0x11111100), 0);
      continue;
    }
#endif
    result.v[i] = block.v[i] == block.v[i] ? block.v[i] : result.v[i];
  }
  return result;
}

// Makes NaNs canonical in a block of R that was read from elements of T. All data not stored as R passes through this
// function or the next one: rounding to bfloat16 would turn other NaNs into numbers, see round_to_bfloat16.
template <class T, class R>
NORMOPS_INLINE Block<R> canonicalize_nan(const Block<R>& block) {
  if constexpr (std::is_same_v<R, bfloat16> && !std::is_same_v<T, bfloat16>) return canonical_nans(block);
  return block;
}

// Converts a number to the compute type of R, with a canonical NaN.
template <class R, class Number>
NORMOPS_INLINE compute_t<R> canonical_number(Number number) {
  return number == number ? static_cast<compute_t<R>>(number) : std::numeric_limits<compute_t<R>>::quiet_NaN();
}

// Loads numbers of the compute type that are stored in R's packed order.
template <class R>
NORMOPS_INLINE Block<R> load_packed(const compute_t<R>* source) {
  using B = Block<R>;
  B block;
  for (int i = 0; i < B::kVectors; i++) block.v[i] = load_vector<typename B::vector>(source + i * B::kVectorLanes);
  return block;
}

template <class R>
NORMOPS_INLINE void store_packed(compute_t<R>* target, const Block<R>& block) {
  using B = Block<R>;
  for (int i = 0; i < B::kVectors; i++) write(target + i * B::kVectorLanes, block.v[i], Cached{});
}

// Converts elements of T to a block of R. Types with different compute types (a float64 weight with a float32 input, or
// the other way round) are rare, and converted number by number. Values computed from the block must still pass through
// canonicalize_nan.
template <class R, class T>
NORMOPS_INLINE Block<R> convert(const T* source, FullBlock = {}) {
  constexpr int kRegister = Block<R>::kVectorLanes;
  if constexpr (!std::is_same_v<compute_t<R>, compute_t<T>>) {
    compute_t<R> numbers[kLanes<R>];
    for (int i = 0; i < kLanes<R>; i++) {
      T lanes[kLanes<T>] = {source[i]};
      numbers[i] = static_cast<compute_t<R>>(convert<T>(lanes).v[0][0]);
    }
    return convert<R>(numbers);
  } else if constexpr (kEvenOdd<R> && std::is_same_v<R, T>) {
    const auto pairs = load_vector<u32_vector>(source);
    return {bit_cast<f32_vector>(pairs << 16), bit_cast<f32_vector>(pairs & 0xffff0000)};
  } else if constexpr (kEvenOdd<R>) {
    return separate(load_register(source), load_register(source + kRegister), RegisterLanes{});
  } else {
    Block<R> block;
    for (int i = 0; i < block.kVectors; i++) block.v[i] = load_register(source + i * kRegister);
    return block;
  }
}

template <class R, class T>
NORMOPS_INLINE Block<R> convert(const T* source, PartialBlock part) {
  T lanes[kLanes<R>];
  load_part(lanes, source, part.lanes);
  return convert<R>(lanes);
}

// Converts elements of T to a block of R, and makes NaNs canonical.
template <class R, class T, class Extent = FullBlock>
NORMOPS_INLINE Block<R> load(const T* source, Extent extent = {}) {
  return canonicalize_nan<T>(convert<R>(source, extent));
}

// Converts a number to the compute type of T. For 16 bits it rounds a double to odd: rounding the result to T then
// gives the same bits as rounding the double itself.
template <class T, class Number>
NORMOPS_INLINE compute_t<T> narrowed(Number number) {
  auto result = static_cast<compute_t<T>>(number);
  if constexpr (sizeof(T) == 2 && sizeof(Number) == 8) {
    if (result != number) {
      uint32_t bits = bit_cast<uint32_t>(result);
      if ((result > number) == (number > 0)) bits--;  // undoes rounding away from zero
      result = bit_cast<float>(bits | 1);
    }
  }
  return result;
}

// Stores a block of R as elements of T. If T is not R, NaNs may have any payload, so they are replaced first.
template <class R, class T, class StorePolicy = Cached>
NORMOPS_INLINE void store(T* target, const Block<R>& block, FullBlock = {}, StorePolicy way = {}) {
  constexpr int kRegister = Block<R>::kVectorLanes;
  if constexpr (!std::is_same_v<compute_t<R>, compute_t<T>>) {
    compute_t<R> numbers[kLanes<R>];
    store(numbers, block);
    for (int i = 0; i < kLanes<R>; i++) {
      T lanes[kLanes<T>];
      store(lanes, canonical_nans(broadcast<T>(narrowed<T>(numbers[i]))));
      target[i] = lanes[0];
    }
  } else if constexpr (kEvenOdd<R> && std::is_same_v<R, T>) {
    write(target, round_to_pairs(block.v[0], block.v[1]), way);
  } else {
    const Block<R> numbers = std::is_same_v<R, T> ? block : canonical_nans(block);
    if constexpr (kEvenOdd<R>) {
      store_register(target, interleave<0>(numbers, RegisterLanes{}), way);
      store_register(target + kRegister, interleave<kRegister>(numbers, RegisterLanes{}), way);
    } else {
      for (int i = 0; i < block.kVectors; i++) store_register(target + i * kRegister, numbers.v[i], way);
    }
  }
}

template <class R, class T, class StorePolicy = Cached>
NORMOPS_INLINE void store(T* target, const Block<R>& block, PartialBlock part, StorePolicy = {}) {
  T lanes[kLanes<R>];
  store(lanes, block);
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  if constexpr (sizeof lanes == 64) {
    __m512i bits;
    std::memcpy(&bits, lanes, sizeof bits);
    return _mm512_mask_storeu_epi8(target, mask_of_bytes(part.lanes * sizeof(T)), bits);
  }
#endif
  copy_part<sizeof lanes / 2>(reinterpret_cast<char*>(target), reinterpret_cast<const char*>(lanes),
                              part.lanes * static_cast<int64_t>(sizeof(T)));
}

// Returns the block rounded to T.
template <class T, class R>
NORMOPS_INLINE Block<R> rounded(const Block<R>& block) {
  if constexpr (sizeof(T) >= sizeof(compute_t<R>)) {
    return block;
  } else {
    T lanes[kLanes<R>];
    store(lanes, block);
    return load<R>(lanes);
  }
}

// Calls visit(column, FullBlock or PartialBlock) for each block of a row of R.
template <class R, class Visit>
NORMOPS_INLINE void for_each_block(int64_t begin, int64_t end, Visit visit) {
  for (; begin + kLanes<R> <= end; begin += kLanes<R>) visit(begin, FullBlock{});
  if (begin < end) visit(begin, PartialBlock{end - begin});
}

template <class R>
NORMOPS_INLINE Block<R> operator*(const Block<R>& a, const Block<R>& b) {
  Block<R> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = a.v[i] * b.v[i];
  return block;
}

template <class R>
NORMOPS_INLINE Block<R> operator+(const Block<R>& a, const Block<R>& b) {
  Block<R> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = a.v[i] + b.v[i];
  return block;
}

template <class R>
NORMOPS_INLINE Block<R> operator-(const Block<R>& a) {
  Block<R> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = -a.v[i];
  return block;
}

// a * b + c, rounded once.
template <class R>
NORMOPS_INLINE Block<R> fma(const Block<R>& a, const Block<R>& b, const Block<R>& c) {
  Block<R> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = fma_vector(a.v[i], b.v[i], c.v[i]);
  return block;
}

template <class Scalar, int kCount>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(kCount * sizeof(Scalar))));
};

template <class R>
using quad_t = typename VectorOf<compute_t<R>, 4>::type;

// Adds the halves of one or several vectors until four lanes are left.
template <class R, class Lanes>
NORMOPS_INLINE quad_t<R> fold(const Lanes& lanes) {
  if constexpr (sizeof(Lanes) == sizeof(quad_t<R>)) {
    return bit_cast<quad_t<R>>(lanes);
  } else {
    typename VectorOf<compute_t<R>, sizeof(Lanes) / 2 / sizeof(compute_t<R>)>::type halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return fold<R>(halves[0] + halves[1]);
  }
}

// The number of independent accumulator chains of a sum, 64 bytes each: enough to hide the latency of an fma on every
// instruction set.
constexpr int kChains = 4;

// The blocks that hold the chains of a sum.
template <class R>
constexpr int kChainBlocks = kChains * 64 / static_cast<int>(sizeof(Block<R>));

// The lanes of a sum's chains, folded to four in column order, so that folded sums can be added to each other.
template <class R>
using Folded = quad_t<R>;

template <class R>
NORMOPS_INLINE Folded<R> fold_chains(const Block<R> (&chain)[kChainBlocks<R>]) {
  using B = Block<R>;
  if constexpr (kEvenOdd<R>) {
    Folded<R> parts[2];
    for (int i = 0; i < 2; i++) {
      if constexpr (kChainBlocks<R> == 2) {  // each half of a register belongs to one chain
        typename VectorOf<float, B::kVectorLanes / 2>::type first[2], second[2];
        std::memcpy(first, &chain[0].v[i], sizeof first);
        std::memcpy(second, &chain[1].v[i], sizeof second);
        parts[i] = fold<R>((first[0] + first[1]) + (second[0] + second[1]));
      } else {
        parts[i] = fold<R>((chain[0].v[i] + chain[1].v[i]) + (chain[2].v[i] + chain[3].v[i]));
      }
    }
    return shuffle<0, 4, 1, 5>(parts[0], parts[1]) + shuffle<2, 6, 3, 7>(parts[0], parts[1]);
  } else {
    return fold<R>(((chain[0] + chain[1]) + (chain[2] + chain[3])).v);
  }
}

// Sums the lanes of four folded sums, each as (0 + 2) + (1 + 3), in two steps that transpose while they add.
template <class R>
NORMOPS_INLINE void sums_of(const Folded<R>* folded, compute_t<R>* sums) {
  const Folded<R>&a = folded[0], &b = folded[1], &c = folded[2], &d = folded[3];
  const Folded<R> ab = shuffle<0, 1, 4, 5>(a, b) + shuffle<2, 3, 6, 7>(a, b);
  const Folded<R> cd = shuffle<0, 1, 4, 5>(c, d) + shuffle<2, 3, 6, 7>(c, d);
  const Folded<R> result = shuffle<0, 2, 4, 6>(ab, cd) + shuffle<1, 3, 5, 7>(ab, cd);
  std::memcpy(sums, &result, sizeof result);
}

template <class R>
NORMOPS_INLINE compute_t<R> sum_of(const Folded<R>& folded) {
  const Folded<R> same[] = {folded, folded, folded, folded};
  compute_t<R> sums[4];
  sums_of<R>(same, sums);
  return sums[0];
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
