// Registers of the compute types and the conversions from and to the storage types. Included once per instruction set
// by foreach_isa.h, hence no include guard. Arithmetic uses the compiler's vector extension; intrinsics replace it only
// if it lacks an operation or compiles to slower code.

namespace normops::cpu::NORMOPS_ISA {
namespace {

#define NORMOPS_INLINE inline __attribute__((always_inline))
#define NORMOPS_INLINE_LAMBDA __attribute__((always_inline))

typedef float f32_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef double f64_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef uint32_t u32_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
typedef uint16_t u16_vector __attribute__((vector_size(NORMOPS_VECTOR_BYTES / 2)));  // as many lanes as f32_vector

template <class To, class From>
NORMOPS_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Returns the elements of a and b in the order of `kFrom`, which numbers them from a's first to b's last.
template <int... kFrom, class Vector>
NORMOPS_INLINE Vector shuffle(const Vector& a, const Vector& b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kFrom...);
#else  // GCC 11
  using Wide = std::conditional_t<sizeof(a[0]) == 8, uint64_t, uint32_t>;
  typedef std::conditional_t<sizeof(a[0]) == 2, uint16_t, Wide> Indices __attribute__((vector_size(sizeof(Vector))));
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
  for (int lane = 0; lane < NORMOPS_VECTOR_BYTES / 4; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
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
  for (int lane = 0; lane < NORMOPS_VECTOR_BYTES / 8; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// Returns the larger of a and b, or b if either is a NaN.
template <class Vector>
NORMOPS_INLINE Vector max_vector(Vector a, Vector b) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  // One instruction; GCC 12 compiles the generic expression to two.
  if constexpr (std::is_same_v<Vector, f32_vector>) {
    return _mm512_max_ps(a, b);
  } else {
    return _mm512_max_pd(a, b);
  }
#else
  return a > b ? a : b;
#endif
}

// Returns -|v|.
template <class Vector>
NORMOPS_INLINE Vector minus_magnitude(Vector v) {
  typedef std::conditional_t<sizeof(v[0]) == 8, uint64_t, uint32_t> Bits __attribute__((vector_size(sizeof(Vector))));
  const Vector minus_zero = -Vector{};
  return bit_cast<Vector>(bit_cast<Bits>(v) | bit_cast<Bits>(minus_zero));
}

// widen() and narrow() are __builtin_convertvector, which GCC 12 compiles to twice the instructions on AVX2.
NORMOPS_INLINE u32_vector widen(u16_vector v) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  return bit_cast<u32_vector>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(v)));
#elif defined(NORMOPS_F16C)
  return bit_cast<u32_vector>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, u32_vector);
#endif
}

// Requires numbers below 2^16.
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

// Rounds to bfloat16, to nearest, ties to even. The results are the upper halves of the lanes; the lower halves are
// undefined. The carry would turn a NaN with a large payload into a number. Kernels have no such NaNs: payloads of
// bfloat16 inputs and of hardware NaNs end in 16 zeros, and canonicalize_nan() replaces all others.
NORMOPS_INLINE u32_vector round_to_bfloat16(f32_vector f) {
  const u32_vector bits = bit_cast<u32_vector>(f);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// Combines the lower halves of a's lanes with the upper halves of b's lanes.
template <int... kHalf>
NORMOPS_INLINE u32_vector blend_halves(u32_vector a, u32_vector b, std::integer_sequence<int, kHalf...>) {
  typedef uint16_t halves __attribute__((vector_size(NORMOPS_VECTOR_BYTES)));
  constexpr int kCount = sizeof...(kHalf);
  return bit_cast<u32_vector>(shuffle<kHalf + kHalf % 2 * kCount...>(bit_cast<halves>(a), bit_cast<halves>(b)));
}

// Rounds two registers to bfloat16: `first` into the lower halves of the lanes, `second` into the upper halves.
NORMOPS_INLINE u32_vector round_to_pairs(f32_vector first, f32_vector second) {
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  // Gathers upper and lower halves first, so that all are rounded at once with half the instructions. Per element:
  //   upper + ((lower | (upper & 1)) > 0x8000)
  const __m512i a = bit_cast<__m512i>(first), b = bit_cast<__m512i>(second);
  const __m512i to_lower =
      _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
  const __m512i to_upper = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  const __m512i upper = _mm512_mask_shuffle_epi8(b, 0x3333333333333333, a, to_lower);
  const __m512i lower = _mm512_mask_shuffle_epi8(a, 0xcccccccccccccccc, b, to_upper);
  const __m512i rest = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(1), 0xf8);  // lower | (upper & 1)
  const __mmask32 is_up = _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16(static_cast<short>(0x8000)));
  return bit_cast<u32_vector>(_mm512_mask_add_epi16(upper, is_up, upper, _mm512_set1_epi16(1)));
#else
  return blend_halves(round_to_bfloat16(first) >> 16, round_to_bfloat16(second),
                      std::make_integer_sequence<int, NORMOPS_VECTOR_BYTES / 2>{});
#endif
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

// Rounds to nearest, ties to even. A NaN becomes quiet and keeps the upper bits of its payload.
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

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
