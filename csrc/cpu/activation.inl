// The activations of gates and their slopes, see kernel_args.h. Each has a few roundings between load and store, which
// reference/oracle.py counts. All instruction sets with fused multiply-adds give the same bits.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The constants of exp(x) = 2^n * exp(rest), with x = n * ln2 + rest and |rest| <= ln2 / 2. exp(rest) is 1 + rest +
// rest^2 * (c[0] + c[1] * rest + ...). c has the least relative error (Remez), below a tenth of a roundoff.
template <class Compute>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = int32_t;
  static constexpr float log2e = 0x1.715476p+0f;
  static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;  // n * ln2_high is exact
  // Adding this to a number rounds it to an integer, which the low bits then hold.
  static constexpr float integer = 0x1.8p23f;
  static constexpr float lowest = -104;  // exp is 0 from here down
  static constexpr int mantissa_bits = 23;
  static constexpr Bits bits_of_half_range = (127 + 64) << 23;
  static constexpr float inverse_of_half_range = 0x1p-64f;
  static constexpr float c[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239d4p-7f, 0x1.6a244cp-10f};
};

template <>
struct ExpConstants<double> {
  using Bits = int64_t;
  static constexpr double log2e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double integer = 0x1.8p52;
  static constexpr double lowest = -746;
  static constexpr int mantissa_bits = 52;
  static constexpr Bits bits_of_half_range = int64_t{1023 + 512} << 52;
  static constexpr double inverse_of_half_range = 0x1p-512;
  static constexpr double c[] = {
      0x1.000000000000ap-1,  0x1.55555555554fap-3,  0x1.555555555088bp-5,  0x1.1111111127b9ep-7,  0x1.6c16c184268eep-10,
      0x1.a01a012a691e8p-13, 0x1.a0199a1680118p-16, 0x1.71df253af43e3p-19, 0x1.28ad6901ef859p-22, 0x1.ad7f7a9b10222p-26,
  };
};

// Returns v * 2^n, rounded once; `shifted` is n + Constants::integer. 2^n itself may be below the least normal number,
// so it is split into two factors if no instruction does this.
template <class Compute, class Vector>
NORMOPS_INLINE Vector times_power_of_two(Vector v, Vector shifted) {
  using Constants = ExpConstants<Compute>;
#if defined(NORMOPS_F16C) && NORMOPS_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<Compute, float>) {
    return _mm512_scalef_ps(v, shifted - Constants::integer);
  } else {
    return _mm512_scalef_pd(v, shifted - Constants::integer);
  }
#else
  typedef typename Constants::Bits Integers __attribute__((vector_size(sizeof(Vector))));
  const auto power =
      bit_cast<Vector>((bit_cast<Integers>(shifted) << Constants::mantissa_bits) + Constants::bits_of_half_range);
  return v * power * Constants::inverse_of_half_range;
#endif
}

// Returns exp(x) for x <= 0, down to the smallest subnormal results.
template <class Compute, class Vector>
NORMOPS_INLINE Vector exp_vector(Vector x) {
  using Constants = ExpConstants<Compute>;
  const Vector zero = {};
  x = max_vector(zero + Constants::lowest, x);
  const Vector shifted = fma_vector(x, zero + Constants::log2e, zero + Constants::integer);
  const Vector n = shifted - Constants::integer;
  const Vector rest = fma_vector(n, zero - Constants::ln2_low, fma_vector(n, zero - Constants::ln2_high, x));
  constexpr int kTerms = sizeof(Constants::c) / sizeof(Compute);
  Vector series = zero + Constants::c[kTerms - 1];
#pragma GCC unroll 16
  for (int k = kTerms - 2; k >= 0; k--) series = fma_vector(series, rest, zero + Constants::c[k]);
  series = fma_vector(series, rest, zero + 1);
  series = fma_vector(series, rest, zero + 1);
  return times_power_of_two<Compute>(series, shifted);
}

// Returns the smaller of sigmoid(g) and 1 - sigmoid(g), exp(-|g|) / (1 + exp(-|g|)). 1 minus the result is the other
// one, as accurately rounded. Activations use both, without cancellation, overflow or a second exp.
template <class R>
NORMOPS_INLINE Block<R> smaller_part(const Block<R>& g) {
  using Vector = typename Block<R>::vector;
  Block<R> smaller;
  for (int i = 0; i < g.kVectors; i++) {
    const Vector e = exp_vector<compute_t<R>>(minus_magnitude(g.v[i]));
    smaller.v[i] = e / (1 + e);
  }
  return smaller;
}

template <class R>
struct Activated {
  Block<R> value, slope;
};

// With s = sigmoid(g), sigmoid has the slope s * (1 - s), and silu = g * s has the slope silu * (1 - s) + s.
template <class R>
NORMOPS_INLINE Activated<R> activated(const Block<R>& g, const Block<R>& smaller, Activation activation) {
  Block<R> s, complement;
  for (int i = 0; i < g.kVectors; i++) {
    const auto larger = 1 - smaller.v[i];
    s.v[i] = g.v[i] < 0 ? smaller.v[i] : larger;
    complement.v[i] = g.v[i] < 0 ? larger : smaller.v[i];
  }
  if (activation == Activation::sigmoid) return {s, s * complement};
  const Block<R> silu = g * s;
  return {silu, fma(silu, complement, s)};
}

template <class R>
NORMOPS_INLINE Block<R> activated(const Block<R>& g, Activation activation) {
  return activated(g, smaller_part(g), activation).value;
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
