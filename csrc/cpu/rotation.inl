// Rows of cos and sin, and the rotation of columns by them.

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class R>
using VectorLanes = std::make_integer_sequence<int, Block<R>::kVectorLanes>;

// Returns each number of half a block twice.
template <class R, int... kLane>
NORMOPS_INLINE Block<R> doubled(const Block<R>& half, std::integer_sequence<int, kLane...>) {
  Block<R> result;
  for (int i = 0; i < result.kVectors; i += 2) {
    result.v[i] = shuffle<kLane / 2 ...>(half.v[i / 2], half.v[i / 2]);
    if constexpr (Block<R>::kVectors > 1) {
      result.v[i + 1] = shuffle<(Block<R>::kVectorLanes + kLane) / 2 ...>(half.v[i / 2], half.v[i / 2]);
    }
  }
  return result;
}

template <class R, int... kLane>
NORMOPS_INLINE Block<R> with_pairs_swapped(const Block<R>& block, std::integer_sequence<int, kLane...>) {
  Block<R> result;
  for (int i = 0; i < result.kVectors; i++) result.v[i] = shuffle<(kLane ^ 1)...>(block.v[i], block.v[i]);
  return result;
}

// Negates the first of two adjacent columns if kFirst, otherwise the second one.
template <class R, bool kFirst, int... kLane>
NORMOPS_INLINE Block<R> with_one_negated(const Block<R>& block, std::integer_sequence<int, kLane...>) {
  const typename Block<R>::vector signs = {(kLane % 2 == (kFirst ? 0 : 1) ? compute_t<R>(-1) : compute_t<R>(1))...};
  Block<R> result;
  for (int i = 0; i < result.kVectors; i++) result.v[i] = block.v[i] * signs;
  return result;
}

// The cos and sin of a row, of type W, for blocks of R in columns [offset, offset + 2 * pairs).
template <class R, class W>
struct Angles {
  const W *cos, *sin;
  int64_t offset, pairs;
  bool of_pair;  // whether both columns of a pair have the same angle

  // Rotates blocks whose first one begins at `column`, or applies the transpose if kBack. For columns i, j of a pair:
  //   y[i] = x[i] * cos[i] - x[j] * sin[i], y[j] = x[j] * cos[j] + x[i] * sin[j]
  template <bool kBack, class Extent>
  NORMOPS_INLINE void turn(const SplitPair&, Block<R> (&y)[2], int64_t column, Extent extent) const {
    const W *const cosines = cos + (column - offset), *const sines = sin + (column - offset);
    const Block<R> c = convert<R>(cosines, extent), s = convert<R>(sines, extent);
    if (of_pair) {
      turn_pairs<kBack>(y[0], y[1], c, c, s, s);
    } else {
      turn_pairs<kBack>(y[0], y[1], c, convert<R>(cosines + pairs, extent), s, convert<R>(sines + pairs, extent));
    }
    y[0] = canonicalize_nan<W>(y[0]), y[1] = canonicalize_nan<W>(y[1]);
  }

  template <bool kBack, class Extent>
  NORMOPS_INLINE void turn(const InterleavedBlock&, Block<R> (&y)[1], int64_t column, Extent extent) const {
    const Block<R> c = of_interleaved(cos, column - offset, extent), s = of_interleaved(sin, column - offset, extent);
    if constexpr (kEvenOdd<R>) {
      const auto even = y[0].v[0], odd = y[0].v[1];
      if constexpr (kBack) {
        y[0].v[0] = fma_vector(even, c.v[0], odd * s.v[1]);
        y[0].v[1] = fma_vector(odd, c.v[1], -(even * s.v[0]));
      } else {
        y[0].v[0] = fma_vector(even, c.v[0], -(odd * s.v[0]));
        y[0].v[1] = fma_vector(odd, c.v[1], even * s.v[1]);
      }
    } else {
      constexpr VectorLanes<R> kVectorLanes;
      const Block<R> other =
          kBack ? with_pairs_swapped(y[0] * s, kVectorLanes) : with_pairs_swapped(y[0], kVectorLanes) * s;
      y[0] = fma(y[0], c, with_one_negated<R, !kBack>(other, kVectorLanes));
    }
    y[0] = canonicalize_nan<W>(y[0]);
  }

 private:
  template <bool kBack>
  static NORMOPS_INLINE void turn_pairs(Block<R>& first, Block<R>& second, const Block<R>& cos_first,
                                        const Block<R>& cos_second, const Block<R>& sin_first,
                                        const Block<R>& sin_second) {
    const Block<R> x = first;
    if constexpr (kBack) {
      first = fma(x, cos_first, second * sin_second);
      second = fma(second, cos_second, -(x * sin_first));
    } else {
      first = fma(x, cos_first, -(second * sin_first));
      second = fma(second, cos_second, x * sin_second);
    }
  }

  // Returns a table's numbers for the columns of a block, each twice if a pair has one angle.
  template <class Extent>
  NORMOPS_INLINE Block<R> of_interleaved(const W* table, int64_t column, Extent extent) const {
    if (!of_pair) return convert<R>(table + column, extent);
    table += column / 2;
    [[maybe_unused]] int64_t pairs = kLanes<R> / 2;
    if constexpr (std::is_same_v<Extent, PartialBlock>) pairs = extent.lanes / 2;
    // Loads whole registers from the table itself: a copy is stored in parts, and loading it would stall.
    if constexpr (kEvenOdd<R>) {
      typename Block<R>::vector of_pairs;
      if constexpr (std::is_same_v<Extent, FullBlock>) {
        of_pairs = load_register(table);
      } else {
        W numbers[kLanes<R> / 2];
        load_part(numbers, table, pairs);
        of_pairs = load_register(numbers);
      }
      return {of_pairs, of_pairs};
    } else if constexpr (std::is_same_v<Extent, FullBlock> && Block<R>::kVectors > 1) {
      Block<R> half;
      for (int i = 0; i < half.kVectors / 2; i++) half.v[i] = load_register(table + i * half.kVectorLanes);
      return doubled(half, VectorLanes<R>());
    } else {
      return doubled(convert<R>(table, PartialBlock{pairs}), VectorLanes<R>());
    }
  }
};

// The rotation of all rows. Rows of sin need no pointers, as cos and sin share a layout: AVX2 lacks registers for them.
struct SharedRotation : Rotation {
  intptr_t sin_behind_cos;  // in bytes

  explicit SharedRotation(const CpuArgs& args)
      : Rotation(args.rotation),
        sin_behind_cos(reinterpret_cast<intptr_t>(args[kSin].data) - reinterpret_cast<intptr_t>(args[kCos].data)) {}

  template <class R, class W>
  NORMOPS_INLINE Angles<R, W> angles(const W* cos) const {
    const auto* const sin = reinterpret_cast<const W*>(reinterpret_cast<intptr_t>(cos) + sin_behind_cos);
    return {cos, sin, offset, pairs, angle_of_pair};
  }
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
