// BackwardRowOp, tiles of rows, and the first pass of a backward, which sums over each row:
//   square_sum = sum(h^2), dot = sum(dy * w * h)
#include "grouped_rows.inl"
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The defaults of a backward's RowOp: pointers into the tensors of a row, and functions that compute blocks of h and
// dy. The norm normalizes h; dy is the gradient of h * rstd * scale. R is the type of the input and of the packed
// order. T is the type of grad_output, to which intermediate results are rounded if the arguments' Rounding says so. A
// RowOp has
//   kTensors
//   kComputeBound: as in forward_rows.inl
//   kGradRows: whether rows are written; if not, only gradients of parameters are requested
//   kFormsGradient: whether dy is computed from grad_output, instead of being grad_output itself
//   kSharedTerms: whether the two sums of a row share costly terms, so that one loop computes both; without costly
//     terms, AVX2 takes up to 1.1 of the time
//   kTakesResidualAndSums: whether it supports a grad_residual, and sums as inputs or outputs
//   kPairing: how columns of dy are paired
//   kRowBytes, kAllBytes: the bytes of a column that are read, and that are read or written
//   Shared: the members that all rows share, constructed from the arguments
//   a constructor (rows, const Shared&, position), which takes each of its tensors from GroupedTensors::Next;
//     `position`, the row's index in the tile, selects the scratch for results of the first pass
//   h(column, extent): a block of h, for the first pass
//   summed(column, extent): the Terms of a block, for the first pass
//   terms(column, extent): the Terms of a block, for the second pass
//   paired_terms(parts, column, extent), if columns are paired: the Terms of the blocks of these parts, for either
//     pass. The other functions are called for columns without a pair.
//   prefetch_read(column), prefetch_written(column)
//   store(column, outputs, extent, policy)
// Terms have dy, h and
//   outputs(gradient, rstd, w): the blocks to store, from the gradient of h
template <class R, class T>
struct BackwardRowOp {
  using Element = R;
  using Gradient = T;
  using Outputs = Block<R>;
  static constexpr bool kComputeBound = false, kGradRows = true, kFormsGradient = false, kSharedTerms = false,
                        kTakesResidualAndSums = false;
  static constexpr Pairing kPairing = Pairing::none;
  static constexpr auto kRowBytes = static_cast<int64_t>(sizeof(T) + sizeof(R));
  static constexpr int64_t kAllBytes = kRowBytes + sizeof(R);

  struct Shared {
    explicit Shared(const CpuArgs&) {}
  };

  struct Terms {
    Block<R> dy, h;

    NORMOPS_INLINE Outputs outputs(const Block<R>& gradient, const Block<R>&, const Block<R>&) const {
      return gradient;
    }
  };

  const T* grad_output;
  const R* input;
  R* grad_input;  // null if not requested

  BackwardRowOp() = default;
  template <class Rows>
  explicit NORMOPS_INLINE BackwardRowOp(const Rows& rows)
      : grad_output(rows.template row<kGradOutput, const T>()),
        input(rows.template row<kInput, const R>()),
        grad_input(rows.template row<kGradInput, R>()) {}

  template <class Extent>
  NORMOPS_INLINE Block<R> h(int64_t column, Extent extent) const {
    return load<R>(input + column, extent);
  }
  template <class Extent>
  NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
    return {load<R>(grad_output + column, extent), h(column, extent)};
  }
  template <class Extent>
  NORMOPS_INLINE Terms summed(int64_t column, Extent extent) const {
    return terms(column, extent);
  }
  NORMOPS_INLINE void prefetch_read(int64_t column) const {
    prefetch(input + column);
    prefetch(grad_output + column);
  }
  NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(grad_input + column); }
  template <class Extent, class StorePolicy>
  NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, StorePolicy way) const {
    if (grad_input != nullptr) NORMOPS_ISA::store(grad_input + column, gradient, extent, way);
  }
};

// Returns whether only sums over rows are requested.
template <class RowOp>
bool wants_sums(const CpuArgs& args) {
  return RowOp::kTakesResidualAndSums && args.sums == Sums::output;
}

constexpr BackwardConfig kConfig = backward_config(NORMOPS_VECTOR_BYTES);

// Pointers to the sums over a row, if they are inputs or outputs.
template <class Number>
struct SumsOfRow {
  static constexpr TensorIndex kTensors[] = {kSquareSum, kDot};
  Number *square_sum, *dot;

  SumsOfRow() = default;
  template <class Rows>
  explicit NORMOPS_INLINE SumsOfRow(const Rows& rows)
      : square_sum(rows.template row<kSquareSum, Number>()), dot(rows.template row<kDot, Number>()) {}
};

// Rows that pass through both passes together. With several groups, a tile may hold rows of consecutive groups:
// `rows_per_group` rows of the first group, then as many of the next one, and so on.
template <class RowOp>
struct BackwardTile {
  using R = typename RowOp::Element;

  int count = 0, rows_per_group = 1;
  const compute_t<R>* scale;  // of the first group
  compute_t<R>* weight_sum;   // of the leaf, for the first group, or null if grad_weight is not requested
  compute_t<R>* bias_sum;     // the same for grad_bias
  int64_t stride;             // from a group's scale, or sum, to the next one's
  bool begins_leaf;           // whether nothing has been added to the sums yet
  int merges;                 // how often the last two sums are added after the tile
  RowOp rows[kBackwardTile];
  compute_t<R> rstd[kBackwardTile], minus_c[kBackwardTile];
  SumsOfRow<compute_t<R>> sums[kBackwardTile];

  // Computes rstd and minus_c from the sums of h^2 and dy * w * h. The latter are used only if rows are written.
  NORMOPS_INLINE void set_sums(const double (&squares)[kBackwardTile], const double (&dots)[kBackwardTile],
                               int64_t cols, double eps) {
    compute_t<R> square_sum[kBackwardTile], dot[kBackwardTile];
    for (int first = 0; first < count; first += 4) {
      for (int r = first; r < first + 4; r++) {
        square_sum[r] = static_cast<compute_t<R>>(squares[r]);
        dot[r] = static_cast<compute_t<R>>(dots[r]);
      }
      // Forces rounding: GCC 12 would otherwise continue with the unrounded doubles in a vector register.
      asm("" : "+m"(square_sum), "+m"(dot));
      for (int r = first; r < first + 4; r++) rstd[r] = rstd_of<R>(square_sum[r], cols, eps);
      asm("" : "+m"(rstd));
      for (int r = first; r < first + 4; r++) minus_c[r] = minus_c_of<R>(dot[r], rstd[r], cols);
    }
  }
};

// Returns the run-time Rounding, or a constant without rounding if Casts excludes it.
template <class Casts>
NORMOPS_INLINE Rounding rounding_of(Casts, Rounding rounding) {
  return std::is_same_v<Casts, std::false_type> ? Rounding{} : rounding;
}

// Rounds to the type of the gradient, if requested.
template <class RowOp, class R>
NORMOPS_INLINE Block<R> round_if(const Block<R>& block, bool is_wanted) {
  if constexpr (sizeof(typename RowOp::Gradient) == 2) {
    if (is_wanted) return rounded<typename RowOp::Gradient>(block);
  }
  return block;
}

// Returns the dy of Terms. It is an intermediate result, and may be rounded, if the operator computes it.
template <class RowOp, class Terms>
NORMOPS_INLINE auto gradient_of(const Terms& terms, Rounding rounding) {
  return round_if<RowOp>(terms.dy, RowOp::kFormsGradient && rounding.multiplied);
}

// Returns dy * w.
template <class RowOp, class Terms, class R>
NORMOPS_INLINE Block<R> weighted(const Terms& terms, const Block<R>& w, Rounding rounding) {
  return round_if<RowOp>(gradient_of<RowOp>(terms, rounding) * w, rounding.normalized);
}

// The Terms of one block, with the same members as those of paired blocks.
template <class Terms>
struct TermsOfOne {
  Terms part[1];
};

template <class Row, class Extent>
NORMOPS_INLINE auto terms_of(const Row& row, const SingleBlock&, int64_t column, Extent extent) {
  // Uses no variable: GCC 12 would copy it through the stack in steps that are shorter than a register.
  return TermsOfOne<decltype(row.terms(column, extent))>{{row.terms(column, extent)}};
}

template <class Row, class Parts, class Extent>
NORMOPS_INLINE auto terms_of(const Row& row, const Parts& parts, int64_t column, Extent extent) {
  return row.paired_terms(parts, column, extent);
}

// Sums dy * w * h over a span of a row with paired columns. Each segment has separate spans. They are half as long for
// two blocks at a time, so that no chain is longer than in a row without pairs.
template <class RowOp, Tail kTail, class Row>
NORMOPS_INLINE auto fold_paired_dots(const Row& row, const RotaryColumns& paired,
                                     const compute_t<typename RowOp::Element>* scale, int64_t span, int64_t cols,
                                     Rounding rounding) {
  using R = typename RowOp::Element;
  constexpr Pairing pairing = pairing_of<RowOp>();
  Folded<R> folded[kSegments] = {};
  each_segment<R, pairing>(
      paired, 0, cols, [&]<class Parts>(const Parts& parts, int64_t begin, int64_t end) NORMOPS_INLINE_LAMBDA {
        const int64_t first = begin + span / Parts::kCount, last = first + kSpan / Parts::kCount;
        if (first >= end) return;
        constexpr Tail kTailOfSegment = std::is_same_v<Parts, SingleBlock> ? Tail::looped : kTail;
        folded[parts.segment] = fold_span<R, kTailOfSegment>(
            first, last < end ? last : end, [&](int64_t column, auto extent, Block<R> sum) NORMOPS_INLINE_LAMBDA {
              const auto terms = terms_of(row, parts, column, extent);
              for (int p = 0; p < Parts::kCount; p++) {
                const Block<R> w = load_packed<R>(scale + parts.packed(column, p));
                sum = fma(weighted<RowOp>(terms.part[p], w, rounding), terms.part[p].h, sum);
              }
              return sum;
            });
      });
  return folded[kBefore] + folded[kPaired] + folded[kAfter];
}

template <class RowOp>
NORMOPS_INLINE void fold_row(const RowOp& of_tile, const compute_t<typename RowOp::Element>* scale, int64_t begin,
                             int64_t end, [[maybe_unused]] const RotaryColumns& paired, [[maybe_unused]] int64_t cols,
                             [[maybe_unused]] Rounding rounding, bool prefetches,
                             Folded<typename RowOp::Element>& squares, Folded<typename RowOp::Element>& dots) {
  using R = typename RowOp::Element;
  // A looped tail takes 1.2 to 1.4 of the time at 333 x 100.
  constexpr Tail kTail = branches_at_run_time<RowOp, typename RowOp::Gradient>() ? Tail::looped : Tail::unrolled;
  const RowOp row = of_tile;
  constexpr Pairing pairing = pairing_of<RowOp>();
  if constexpr (RowOp::kGradRows && pairing == Pairing::none && (kConfig.both_sums || RowOp::kSharedTerms)) {
    Folded<R> folded[2];
    fold_span<R, kTail>(begin, end, folded, [&](int64_t column, auto extent, Block<R>(&sums)[2]) NORMOPS_INLINE_LAMBDA {
      const Block<R> w = load_packed<R>(scale + column);
      if (prefetches) row.prefetch_written(column);
      const auto terms = row.summed(column, extent);
      sums[0] = fma(terms.h, terms.h, sums[0]);
      sums[1] = fma(weighted<RowOp>(terms, w, rounding), terms.h, sums[1]);
    });
    squares = folded[0];
    dots = folded[1];
  } else {
    squares = fold_span<R, pairing == Pairing::none ? kTail : Tail::looped>(
        begin, end, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
          const Block<R> h = row.h(column, extent);
          return fma(h, h, sum);
        });
    if constexpr (pairing != Pairing::none) {
      dots = fold_paired_dots<RowOp, kTail>(row, paired, scale, begin, cols, rounding);
    } else if constexpr (RowOp::kGradRows) {
      dots =
          fold_span<R, kTail>(begin, end, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
            if (prefetches) row.prefetch_written(column);
            const auto terms = row.summed(column, extent);
            return fma(weighted<RowOp>(terms, load_packed<R>(scale + column), rounding), terms.h, sum);
          });
    }
  }
}

template <class R>
NORMOPS_INLINE void add_sums(const Folded<R> (&folded)[kBackwardTile], int count, double (&totals)[kBackwardTile]) {
  for (int first = 0; first < count; first += 4) {
    compute_t<R> sums[4];
    sums_of<R>(folded + first, sums);
    for (int r = 0; r < 4; r++) totals[first + r] += sums[r];
  }
}

// The first pass: computes the sums over each row of a tile. Sums dy * w * h only if rows are written.
template <class RowOp, class Casts>
[[gnu::noinline]] void sum_tile(const CpuArgs& args, BackwardTile<RowOp>& tile, bool prefetches, Casts casts) {
  using R = typename RowOp::Element;
  const RotaryColumns paired = paired_columns(args.rotation);
  const Rounding rounding = rounding_of(casts, args.rounding);
  double squares[kBackwardTile] = {}, dots[kBackwardTile] = {};
  Folded<R> square_folds[kBackwardTile] = {}, dot_folds[kBackwardTile] = {};
  for (int64_t begin = 0; begin < args.cols; begin += kSpan) {
    const compute_t<R>* scale = tile.scale;
    for (int r = 0, left = tile.rows_per_group; r < tile.count; r++) {
      fold_row<RowOp>(tile.rows[r], scale, begin, span_end(begin, args.cols), paired, args.cols, rounding, prefetches,
                      square_folds[r], dot_folds[r]);
      if (--left == 0) scale += tile.stride, left = tile.rows_per_group;
    }
    add_sums<R>(square_folds, tile.count, squares);
    if (RowOp::kGradRows) add_sums<R>(dot_folds, tile.count, dots);
  }
  if constexpr (RowOp::kTakesResidualAndSums) {
    if (wants_sums<RowOp>(args)) {
      for (int r = 0; r < tile.count; r++) {
        *tile.sums[r].square_sum = static_cast<compute_t<R>>(squares[r]);
        *tile.sums[r].dot = static_cast<compute_t<R>>(dots[r]);
      }
      return;
    }
  }
  tile.set_sums(squares, dots, args.cols, args.eps);
}

// Reads the sums over each row of a tile, if they are inputs.
template <class RowOp>
void read_sums(const CpuArgs& args, BackwardTile<RowOp>& tile) {
  using R = typename RowOp::Element;
  double squares[kBackwardTile] = {}, dots[kBackwardTile] = {};
  for (int r = 0; r < tile.count; r++) {
    squares[r] = canonical_number<R>(*tile.sums[r].square_sum);
    dots[r] = canonical_number<R>(*tile.sums[r].dot);
  }
  tile.set_sums(squares, dots, args.size, args.eps);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
