// Emulates the AVX-512 intrinsics of the CPU kernels for csrc/cpu/foreach_isa.h, so that machines without AVX-512 can
// run the AVX-512 kernels. The compiler lowers the vectors to AVX2.
#pragma GCC target("avx2,fma,f16c")
#define NORMOPS_ISA avx512
#define NORMOPS_VECTOR_BYTES 64
#define NORMOPS_F16C

namespace emulated {

// The lanes of a register, convertible from and to any register of the same size.
template <class T, int kCount>
struct Lanes {
  Lanes() = default;
  template <class Register>
  explicit Lanes(const Register& v) {
    static_assert(sizeof v == sizeof lane);
    std::memcpy(lane, &v, sizeof lane);
  }
  template <class Register>
  operator Register() const {
    static_assert(sizeof(Register) == sizeof lane);
    Register v;
    std::memcpy(&v, lane, sizeof lane);
    return v;
  }
  T& operator[](int i) { return lane[i]; }
  T lane[kCount] = {};
};

using Floats = Lanes<float, 16>;
using Doubles = Lanes<double, 8>;
using Integers = Lanes<uint32_t, 16>;
using Words = Lanes<uint16_t, 32>;
using HalfWords = Lanes<uint16_t, 16>;
using Bytes = Lanes<unsigned char, 64>;

inline __m512 fmadd(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 16; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}

inline __m512d fmadd(Doubles a, Doubles b, Doubles c) {
  for (int i = 0; i < 8; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}

template <class T, int kCount>
Lanes<T, kCount> larger(Lanes<T, kCount> a, Lanes<T, kCount> b) {
  for (int i = 0; i < kCount; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
  return b;
}

// Computes v * 2^n for integers n.
template <class T, int kCount>
Lanes<T, kCount> times_power_of_two(Lanes<T, kCount> v, Lanes<T, kCount> n) {
  for (int i = 0; i < kCount; i++) v[i] = std::isnan(n[i]) ? v[i] : std::ldexp(v[i], static_cast<int>(n[i]));
  return v;
}

inline __m512i widen(HalfWords v) {
  Integers result;
  for (int i = 0; i < 16; i++) result[i] = v[i];
  return result;
}

inline __m256i narrow(Integers v) {
  HalfWords result;
  for (int i = 0; i < 16; i++) result[i] = static_cast<uint16_t>(v[i]);
  return result;
}

inline __m512 from_float16(HalfWords v) {
  Floats result;
  for (int i = 0; i < 16; i++) result[i] = _cvtsh_ss(v[i]);
  return result;
}

inline __m256i to_float16(Floats v) {
  HalfWords result;
  for (int i = 0; i < 16; i++) result[i] = _cvtss_sh(v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return result;
}

inline __m512i broadcast(const __m128i& v) {
  Bytes result;
  for (int i = 0; i < 4; i++) std::memcpy(result.lane + 16 * i, &v, sizeof v);
  return result;
}

// Loads the first bytes: kernels use no other masks. Inlining would add minutes of compile time.
[[gnu::noinline]] inline __m512i load_bytes(uint64_t mask, const void* source) {
  Bytes result;
  std::memcpy(result.lane, source, __builtin_popcountll(mask));
  return result;
}

[[gnu::noinline]] inline void store_bytes(void* target, uint64_t mask, const Bytes& v) {
  std::memcpy(target, v.lane, __builtin_popcountll(mask));
}

inline __m512i shuffle_bytes(Bytes otherwise, uint64_t mask, Bytes v, Bytes from) {
  for (int i = 0; i < 64; i++) {
    if (mask >> i & 1) otherwise[i] = v[i / 16 * 16 + from[i] % 16];
  }
  return otherwise;
}

inline __m512i set_words(short value) {
  Words result;
  for (uint16_t& word : result.lane) word = static_cast<uint16_t>(value);
  return result;
}

// The bits of a, b and c form the index of each result bit in the table.
inline __m512i look_up_bits(Bytes a, Bytes b, Bytes c, int table) {
  Bytes result;
  for (int i = 0; i < 512; i++) {
    const auto bit = [i](Bytes& v) { return v[i / 8] >> i % 8 & 1; };
    result[i / 8] |= (table >> (4 * bit(a) + 2 * bit(b) + bit(c)) & 1) << i % 8;
  }
  return result;
}

inline uint32_t greater_words(Words a, Words b) {
  uint32_t mask = 0;
  for (int i = 0; i < 32; i++) mask |= uint32_t{a[i] > b[i]} << i;
  return mask;
}

inline __m512i add_words(Words otherwise, uint32_t mask, Words a, Words b) {
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) otherwise[i] = static_cast<uint16_t>(a[i] + b[i]);
  }
  return otherwise;
}

// Supports two of the table's responses, for NaNs and for numbers: 0 selects `otherwise`, 1 selects v.
inline __m512 fix_up(Floats otherwise, Floats v, uint32_t table) {
  for (int i = 0; i < 16; i++) v[i] = (table >> (std::isnan(v[i]) ? 0 : 8) & 1) == 0 ? otherwise[i] : v[i];
  return v;
}

// Requires aligned targets, like the instruction.
inline void stream(void* target, const __m512i& v) {
  if (reinterpret_cast<uintptr_t>(target) % sizeof v != 0) __builtin_trap();
  std::memcpy(target, &v, sizeof v);
}

}  // namespace emulated

#define _mm512_fmadd_ps(a, b, c) emulated::fmadd(emulated::Floats(a), emulated::Floats(b), emulated::Floats(c))
#define _mm512_fmadd_pd(a, b, c) emulated::fmadd(emulated::Doubles(a), emulated::Doubles(b), emulated::Doubles(c))
#define _mm512_max_ps(a, b) emulated::larger(emulated::Floats(a), emulated::Floats(b))
#define _mm512_max_pd(a, b) emulated::larger(emulated::Doubles(a), emulated::Doubles(b))
#define _mm512_set1_epi32(value) value
#define _mm512_fixupimm_ps(otherwise, v, table, flags) \
  emulated::fix_up(emulated::Floats(otherwise), emulated::Floats(v), table)
#define _mm512_scalef_ps(v, n) emulated::times_power_of_two(emulated::Floats(v), emulated::Floats(n))
#define _mm512_scalef_pd(v, n) emulated::times_power_of_two(emulated::Doubles(v), emulated::Doubles(n))
#define _mm512_cvtepu16_epi32(v) emulated::widen(emulated::HalfWords(v))
#define _mm512_cvtepi32_epi16(v) emulated::narrow(emulated::Integers(v))
#define _mm512_cvtph_ps(v) emulated::from_float16(emulated::HalfWords(v))
#define _mm512_maskz_cvtps_ph(mask, v, rounding) emulated::to_float16(emulated::Floats(v))
#define _mm512_broadcast_i32x4 emulated::broadcast
#define _mm512_maskz_loadu_epi8 emulated::load_bytes
#define _mm512_mask_storeu_epi8(target, mask, v) emulated::store_bytes(target, mask, emulated::Bytes(v))
#define _mm512_mask_shuffle_epi8(otherwise, mask, v, from) \
  emulated::shuffle_bytes(emulated::Bytes(otherwise), mask, emulated::Bytes(v), emulated::Bytes(from))
#define _mm512_set1_epi16 emulated::set_words
#define _mm512_ternarylogic_epi32(a, b, c, table) \
  emulated::look_up_bits(emulated::Bytes(a), emulated::Bytes(b), emulated::Bytes(c), table)
#define _mm512_cmpgt_epu16_mask(a, b) emulated::greater_words(emulated::Words(a), emulated::Words(b))
#define _mm512_mask_add_epi16(otherwise, mask, a, b) \
  emulated::add_words(emulated::Words(otherwise), mask, emulated::Words(a), emulated::Words(b))
#define _mm512_stream_si512 emulated::stream
