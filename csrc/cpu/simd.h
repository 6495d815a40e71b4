// Vectors of the compute types and the conversions from and to the storage types. Included once per instruction set, by
// foreach_isa.h, hence no include guard.
//
// A Block is 64 bytes of compute type on every instruction set: 16 floats or 8 doubles, held in 4, 2 or 1 registers.
// The kernels count in blocks, so that sums are formed in the same order everywhere: AVX2, AVX-512 and NEON give the
// same bits. Arithmetic uses the compiler's vector extension; only what it cannot express is written with intrinsics.

namespace normops::cpu::NORMOPS_ISA {
namespace {

#define NORMOPS_INLINE inline __attribute__((always_inline))

typedef float f32_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef double f64_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef uint32_t u32_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef uint16_t u16_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES / 2)));  // as many lanes as f32_vector

template <class Compute>
struct Block {
  using vector = std::conditional_t<std::is_same_v<Compute, double>, f64_vector, f32_vector>;
  static constexpr int kVectors = 64 / NORMOPS_VECTOR_BYTES;
  static constexpr int kVectorLanes = NORMOPS_VECTOR_BYTES / sizeof(Compute);
  vector v[kVectors];
};

template <class Compute>
constexpr int kLanes = 64 / sizeof(Compute);

template <class To, class From>
NORMOPS_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// The elements of a and b, numbered from a's first to b's last, in the order of `kFrom`.
template <int... kFrom, class Vector>
NORMOPS_INLINE Vector shuffle(Vector a, Vector b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kFrom...);
#else  // GCC 11
  typedef std::conditional_t<sizeof(a[0]) == 4, uint32_t, uint16_t> Indices
      __attribute__((vector_size(sizeof(Vector))));
  return __builtin_shuffle(a, b, Indices{kFrom...});
#endif
}

template <class Vector>
NORMOPS_INLINE Vector load_vector(const void* source) {
  Vector v;
  std::memcpy(&v, source, sizeof v);
  return v;
}

NORMOPS_INLINE f32_vector fma_vector(f32_vector a, f32_vector b, f32_vector c) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return _mm512_fmadd_ps(a, b, c);
#elif defined(NORMOPS_F16C)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

NORMOPS_INLINE f64_vector fma_vector(f64_vector a, f64_vector b, f64_vector c) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return _mm512_fmadd_pd(a, b, c);
#elif defined(NORMOPS_F16C)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

// The next two are __builtin_convertvector, for which GCC 12 finds twice the instructions on AVX2.
NORMOPS_INLINE u32_vector widen(u16_vector v) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return bit_cast<u32_vector>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(v)));
#elif defined(NORMOPS_F16C)
  return bit_cast<u32_vector>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, u32_vector);
#endif
}

// Of numbers below 2^16.
NORMOPS_INLINE u16_vector narrow(u32_vector v) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return bit_cast<u16_vector>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(v)));
#elif defined(NORMOPS_F16C)
  const __m256i wide = bit_cast<__m256i>(v);
  return bit_cast<u16_vector>(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
  return __builtin_convertvector(v, u16_vector);
#endif
}

// A bfloat16 in the upper half of each lane: rounded to nearest, ties to even. The lower halves are undefined. The
// carry would turn a NaN with a large payload into a number. The kernels have none: the payloads of bfloat16 inputs and
// of the NaN that hardware makes end in 16 zeros; whatever else gets in goes through canonical_nans first.
NORMOPS_INLINE u32_vector round_to_bfloat16(f32_vector f) {
  const u32_vector bits = bit_cast<u32_vector>(f);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

NORMOPS_INLINE f32_vector float16_to_float(u16_vector h) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return _mm512_cvtph_ps(bit_cast<__m256i>(h));
#elif defined(NORMOPS_F16C)
  return _mm256_cvtph_ps(bit_cast<__m128i>(h));
#elif defined(__aarch64__)
  return vcvt_f32_f16(bit_cast<float16x4_t>(h));
#else
  const u32_vector bits = widen(h);
  const u32_vector magnitude = bits & 0x7fff;
  const u32_vector rebias = u32_vector{} + ((127u - 15u) << 23);
  const u32_vector special = magnitude >= 0x7c00 ? rebias : u32_vector{};  // infinity and NaN: the exponent becomes 255
  const u32_vector quiet = magnitude > 0x7c00 ? u32_vector{} + 0x400000u : u32_vector{};
  const u32_vector normal = ((magnitude << 13) + rebias + special) | quiet;
  typedef int32_t i32_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
  const f32_vector subnormal = __builtin_convertvector(bit_cast<i32_vector>(magnitude), f32_vector) * 0x1p-24f;
  const u32_vector result = magnitude < 0x400 ? bit_cast<u32_vector>(subnormal) : normal;
  return bit_cast<f32_vector>(result | ((bits & 0x8000) << 16));
#endif
}

// Round to nearest, ties to even; a NaN becomes quiet and keeps the upper bits of its payload.
NORMOPS_INLINE u16_vector float_to_float16(f32_vector f) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return bit_cast<u16_vector>(_mm512_maskz_cvtps_ph(0xffff, f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(NORMOPS_F16C)
  return bit_cast<u16_vector>(_mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  return bit_cast<u16_vector>(vcvt_f16_f32(f));
#else
  const u32_vector bits = bit_cast<u32_vector>(f);
  const u32_vector magnitude = bits & 0x7fffffff;
  const u32_vector rebias = u32_vector{} + ((127u - 15u) << 23);
  const u32_vector normal = (magnitude - rebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5, whose last bit is worth 2^-24, lets the addition round to the spacing of float16's subnormals.
  const u32_vector subnormal = bit_cast<u32_vector>(bit_cast<f32_vector>(magnitude) + 0.5f) - 0x3f000000u;
  const u32_vector nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  u32_vector result = magnitude < 0x38800000u ? subnormal : normal;     // below 2^-14
  result = magnitude >= 0x47800000u ? u32_vector{} + 0x7c00u : result;  // from 2^16 on: infinity
  result = magnitude > 0x7f800000u ? nan : result;
  return narrow(result | ((bits >> 16) & 0x8000));
#endif
}

// Widening 16-bit lanes costs a shuffle per register, and AVX2 has few ports for those. For bfloat16 it is cheaper to
// take the even elements of a block into its first register and the odd ones into its second.
template <class T>
constexpr bool kEvenOdd = std::is_same_v<T, bfloat16> && NORMOPS_VECTOR_BYTES == 32;

// From the order in which a block of From holds its elements to that of To.
template <class To, class From, class Compute>
NORMOPS_INLINE Block<Compute> reorder(const Block<Compute>& block) {
  if constexpr (kEvenOdd<To> == kEvenOdd<From>) {
    return block;
  } else if constexpr (kEvenOdd<To>) {
    const auto& [low, high] = block.v;
    return {shuffle<0, 2, 4, 6, 8, 10, 12, 14>(low, high), shuffle<1, 3, 5, 7, 9, 11, 13, 15>(low, high)};
  } else {
    const auto& [even, odd] = block.v;
    return {shuffle<0, 8, 1, 9, 2, 10, 3, 11>(even, odd), shuffle<4, 12, 5, 13, 6, 14, 7, 15>(even, odd)};
  }
}

template <class T>
NORMOPS_INLINE Block<compute_t<T>> load(const T* source) {
  using B = Block<compute_t<T>>;
  B block;
  if constexpr (kEvenOdd<T>) {
    const auto pairs = load_vector<u32_vector>(source);
    block.v[0] = bit_cast<f32_vector>(pairs << 16);
    block.v[1] = bit_cast<f32_vector>(pairs & 0xffff0000);
    return block;
  }
  for (int i = 0; i < B::kVectors; i++) {
    const T* lanes = source + i * B::kVectorLanes;
    if constexpr (std::is_same_v<T, float16>) {
      block.v[i] = float16_to_float(load_vector<u16_vector>(lanes));
    } else if constexpr (std::is_same_v<T, bfloat16>) {
      block.v[i] = bit_cast<f32_vector>(widen(load_vector<u16_vector>(lanes)) << 16);
    } else {
      block.v[i] = load_vector<typename B::vector>(lanes);
    }
  }
  return block;
}

template <class T>
NORMOPS_INLINE void store(T* target, const Block<compute_t<T>>& block) {
  using B = Block<compute_t<T>>;
  if constexpr (kEvenOdd<T>) {
    typedef uint16_t halves __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
    const auto even = bit_cast<halves>(round_to_bfloat16(block.v[0]) >> 16);
    const auto odd = bit_cast<halves>(round_to_bfloat16(block.v[1]));
    const halves pairs = shuffle<0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31>(even, odd);
    std::memcpy(target, &pairs, sizeof pairs);
    return;
  }
  for (int i = 0; i < B::kVectors; i++) {
    T* lanes = target + i * B::kVectorLanes;
    if constexpr (std::is_same_v<T, float16>) {
      const u16_vector half = float_to_float16(block.v[i]);
      std::memcpy(lanes, &half, sizeof half);
    } else if constexpr (std::is_same_v<T, bfloat16>) {
      const u16_vector half = narrow(round_to_bfloat16(block.v[i]) >> 16);
      std::memcpy(lanes, &half, sizeof half);
    } else {
      std::memcpy(lanes, &block.v[i], sizeof block.v[i]);
    }
  }
}

// How much of a block is inside the row. Lanes outside are read as zero and not written.
struct Whole {};
struct Part {
  int64_t lanes;
};

template <class T>
NORMOPS_INLINE Block<compute_t<T>> load(const T* source, Whole) {
  return load(source);
}

template <class T>
NORMOPS_INLINE Block<compute_t<T>> load(const T* source, Part part) {
  T lanes[kLanes<compute_t<T>>] = {};
  std::memcpy(lanes, source, part.lanes * sizeof(T));
  return load(lanes);
}

template <class T>
NORMOPS_INLINE void store(T* target, const Block<compute_t<T>>& block, Whole) {
  store(target, block);
}

template <class T>
NORMOPS_INLINE void store(T* target, const Block<compute_t<T>>& block, Part part) {
  T lanes[kLanes<compute_t<T>>];
  store(lanes, block);
  std::memcpy(target, lanes, part.lanes * sizeof(T));
}

template <class Compute>
NORMOPS_INLINE int64_t lanes_of(Whole) {
  return kLanes<Compute>;
}

template <class Compute>
NORMOPS_INLINE int64_t lanes_of(Part part) {
  return part.lanes;
}

// Calls visit(column, Whole or Part) for each block of a row.
template <class Compute, class Visit>
NORMOPS_INLINE void for_each_block(int64_t begin, int64_t end, Visit visit) {
  for (; begin + kLanes<Compute> <= end; begin += kLanes<Compute>) visit(begin, Whole{});
  if (begin < end) visit(begin, Part{end - begin});
}

template <class Compute>
NORMOPS_INLINE Block<Compute> broadcast(Compute value) {
  Block<Compute> block;
  for (auto& v : block.v) v = value - typename Block<Compute>::vector{};  // keeps the sign of a zero
  return block;
}

// The same numbers, every NaN being the one of std::numeric_limits.
template <class Compute>
NORMOPS_INLINE Block<Compute> canonical_nans(const Block<Compute>& block) {
  Block<Compute> result = broadcast(std::numeric_limits<Compute>::quiet_NaN());
  for (int i = 0; i < block.kVectors; i++) result.v[i] = block.v[i] == block.v[i] ? block.v[i] : result.v[i];
  return result;
}

// A block of Compute, in the order of the elements, from or to a type whose compute type may be another: those pairs (a
// float64 weight with a float32 input, or the other way round) are rare and converted number by number.
template <class Compute, class T, class Extent>
NORMOPS_INLINE Block<Compute> load_elements(const T* source, Extent extent) {
  if constexpr (std::is_same_v<Compute, compute_t<T>>) {
    return reorder<Compute, T>(load(source, extent));
  } else {
    Compute elements[kLanes<Compute>] = {};
    for (int64_t i = 0; i < lanes_of<Compute>(extent); i++) {
      elements[i] = static_cast<Compute>(load(source + i, Part{1}).v[0][0]);
    }
    return load(elements);
  }
}

template <class T, class Compute, class Extent>
NORMOPS_INLINE void store_elements(T* target, const Block<Compute>& block, Extent extent) {
  if constexpr (std::is_same_v<Compute, compute_t<T>>) {
    store(target, reorder<T, Compute>(canonical_nans(block)), extent);
  } else {
    Compute elements[kLanes<Compute>];
    store(elements, block);
    for (int64_t i = 0; i < lanes_of<Compute>(extent); i++) {
      store(target + i, canonical_nans(broadcast(static_cast<compute_t<T>>(elements[i]))), Part{1});
    }
  }
}

// A block of T in the order of R, and back: R is T or the compute type, whose NaNs may have any payload.
template <class R, class T, class Extent>
NORMOPS_INLINE Block<compute_t<R>> load_as(const T* source, Extent extent) {
  if constexpr (std::is_same_v<R, T>) {
    return load(source, extent);
  } else {
    return load_elements<R>(source, extent);
  }
}

template <class R, class T, class Extent>
NORMOPS_INLINE void store_from(T* target, const Block<compute_t<R>>& block, Extent extent) {
  if constexpr (std::is_same_v<R, T>) {
    store(target, block, extent);
  } else {
    store_elements(target, block, extent);
  }
}

template <class Compute>
NORMOPS_INLINE Block<Compute> operator*(const Block<Compute>& a, const Block<Compute>& b) {
  Block<Compute> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = a.v[i] * b.v[i];
  return block;
}

template <class Compute>
NORMOPS_INLINE Block<Compute> operator+(const Block<Compute>& a, const Block<Compute>& b) {
  Block<Compute> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = a.v[i] + b.v[i];
  return block;
}

// a * b + c, rounded once where the instruction set has it (everywhere but on x86's baseline).
template <class Compute>
NORMOPS_INLINE Block<Compute> fma(const Block<Compute>& a, const Block<Compute>& b, const Block<Compute>& c) {
  Block<Compute> block;
  for (int i = 0; i < block.kVectors; i++) block.v[i] = fma_vector(a.v[i], b.v[i], c.v[i]);
  return block;
}

template <class Scalar, int kCount>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(kCount * sizeof(Scalar))));
};

// The sum over the lanes of a vector, folded in halves.
template <class Scalar, int kCount>
NORMOPS_INLINE Scalar fold(const typename VectorOf<Scalar, kCount>::type& lanes) {
  if constexpr (kCount == 2) {
    return lanes[0] + lanes[1];
  } else {
    typename VectorOf<Scalar, kCount / 2>::type halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return fold<Scalar, kCount / 2>(halves[0] + halves[1]);
  }
}

// The sum over the lanes of a block of T: on every instruction set in the same order of elements.
template <class T>
NORMOPS_INLINE compute_t<T> sum(const Block<compute_t<T>>& block) {
  using Compute = compute_t<T>;
  using B = Block<Compute>;
  const auto& v = block.v;
  if constexpr (kEvenOdd<T>) {
    return fold<Compute, B::kVectorLanes>(v[0]) + fold<Compute, B::kVectorLanes>(v[1]);
  } else if constexpr (B::kVectors == 4) {
    return fold<Compute, B::kVectorLanes>((v[0] + v[2]) + (v[1] + v[3]));
  } else if constexpr (B::kVectors == 2) {
    return fold<Compute, B::kVectorLanes>(v[0] + v[1]);
  } else {
    return fold<Compute, B::kVectorLanes>(v[0]);
  }
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
