// The activations of gates and their slopes, see gating.h. Between load and store they are a handful of roundings each,
// which the oracle counts; the same bits wherever multiply-adds are fused.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// What exp needs of a type: x = n * ln2 + rest, exp(x) = 2^n * exp(rest), where |rest| <= ln2 / 2 and the Taylor series
// of this degree is off by less than a tenth of a roundoff.
template <class Compute>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = int32_t;
  static constexpr float log2e = 0x1.715476p+0f;
  static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;  // n * ln2_high is exact
  static constexpr float integer =
      0x1.8p23f;                         // added to a number, rounds it to the integer that the low bits then hold
  static constexpr float lowest = -104;  // whose exp, like that of all below, is 0
  static constexpr int degree = 7, mantissa_bits = 23;
  static constexpr Bits bits_of_half_range = (127 + 64) << 23;
  static constexpr float inverse_of_half_range = 0x1p-64f;
};

template <>
struct ExpConstants<double> {
  using Bits = int64_t;
  static constexpr double log2e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double integer = 0x1.8p52;
  static constexpr double lowest = -746;
  static constexpr int degree = 13, mantissa_bits = 52;
  static constexpr Bits bits_of_half_range = int64_t{1023 + 512} << 52;
  static constexpr double inverse_of_half_range = 0x1p-512;
};

template <class Compute>
constexpr Compute reciprocal_of_factorial(int k) {
  double factorial = 1;
  for (int i = 2; i <= k; i++) factorial *= i;
  return static_cast<Compute>(1 / factorial);
}

// Of x <= 0, down to the smallest subnormal results.
template <class Compute, class Vector>
NORMOPS_INLINE Vector exp_vector(Vector x) {
  using Constants = ExpConstants<Compute>;
  typedef typename Constants::Bits Integers __attribute__((vector_size(sizeof(Vector))));
  const Vector zero = {};
  x = x < Constants::lowest ? zero + Constants::lowest : x;
  const Vector shifted = fma_vector(x, zero + Constants::log2e, zero + Constants::integer);
  const Vector n = shifted - Constants::integer;
  const Vector rest = fma_vector(n, zero - Constants::ln2_low, fma_vector(n, zero - Constants::ln2_high, x));
  Vector series = zero + reciprocal_of_factorial<Compute>(Constants::degree);
#pragma GCC unroll 16
  for (int k = Constants::degree - 1; k >= 0; k--) {
    series = fma_vector(series, rest, zero + reciprocal_of_factorial<Compute>(k));
  }
  // By two factors, as 2^n may be no normal number: the second product rounds, once.
  const Vector power =
      bit_cast<Vector>((bit_cast<Integers>(shifted) << Constants::mantissa_bits) + Constants::bits_of_half_range);
  return series * power * Constants::inverse_of_half_range;
}

// The smaller one of sigmoid(g) and 1 - sigmoid(g): the other one is 1 less that, rounded as well as the smaller one
// itself, so that all about a gate is made of it without cancellation, overflow or another exp.
template <class R>
NORMOPS_INLINE Block<R> smaller_part(const Block<R>& g) {
  using Vector = typename Block<R>::vector;
  Block<R> smaller;
  for (int i = 0; i < g.kVectors; i++) {
    const Vector v = g.v[i];
    const Vector e = exp_vector<compute_t<R>>(v < 0 ? v : -v);
    smaller.v[i] = e / (1 + e);
  }
  return smaller;
}

template <class R>
struct Activated {
  Block<R> value, slope;
};

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

// A row of the gate, or of its gradient, beside rows of T: of its type or of another one, which is told when the kernel
// runs, as kernels for each pair would be too many.
template <class T, class Byte>
struct GateRow {
  Byte* data;  // null if not wanted
  DType dtype;

  template <class Extent>
  NORMOPS_INLINE Block<T> load(int64_t column, Extent extent) const {
    Block<T> block;
    visit([&](auto* row) NORMOPS_INLINE_LAMBDA {
      using G = std::remove_const_t<std::remove_pointer_t<decltype(row)>>;
      block = NORMOPS_ISA::load<T>(row + column, extent);
      // NaNs of another type may have any payload, see round_to_bfloat16.
      if constexpr (!std::is_same_v<T, G>) block = canonical_nans(block);
    });
    return block;
  }

  template <class Extent, class Way>
  NORMOPS_INLINE void store(int64_t column, const Block<T>& block, Extent extent, Way way) const {
    visit([&](auto* row) NORMOPS_INLINE_LAMBDA { NORMOPS_ISA::store(row + column, block, extent, way); });
  }

  NORMOPS_INLINE void prefetch(int64_t column) const {
    __builtin_prefetch(data + column * (dtype == kDType<T> ? sizeof(T) : sizeof(T) == 2 ? 4 : 2), 0, 2);
  }

 private:
  template <class Visit>
  NORMOPS_INLINE void visit(Visit visit) const {
    if (dtype == kDType<T>) return visit(as<T>());
    if constexpr (sizeof(T) == 2) return visit(as<float>());
    if constexpr (std::is_same_v<T, float>) {
      dtype == DType::bfloat16 ? visit(as<bfloat16>()) : visit(as<float16>());
    }
  }
  template <class G>
  NORMOPS_INLINE auto* as() const {
    return reinterpret_cast<std::conditional_t<std::is_const_v<Byte>, const G, G>*>(data);
  }
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
