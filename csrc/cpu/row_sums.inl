// Sums over a row, and rstd, which is computed from one.
//
// The result of a row depends only on that row, the scale, eps and cols. Every multiply-add is an explicit fma (the
// build turns contraction off), so that no two instances of the same line round differently.

namespace normops::cpu::NORMOPS_ISA {
namespace {

NORMOPS_INLINE int64_t span_end(int64_t begin, int64_t cols) { return begin + kSpan < cols ? begin + kSpan : cols; }

// The columns of a step, which has one block for each of a sum's chains.
template <class R>
constexpr int64_t kStep = kChainBlocks<R> * kLanes<R>;

// Compilation of a span's tail, its columns beyond a multiple of kStep. A loop keeps the chains in memory. Unrolled
// code keeps them in registers, but is six times as long. The most common spans have no tail.
enum class Tail { looped, unrolled, none };

// Computes kSums sums over the columns of a span at once. term(column, whole_or_part, accumulators) adds one block to
// each of the accumulators. An optional term.step(column, chains) adds the whole blocks of kStep columns. Folding the
// chains after every span bounds their length, and with it the rounding error, for any width.
template <class R, Tail kTail, int kSums, class Term>
NORMOPS_INLINE void fold_span(int64_t begin, int64_t end, Folded<R> (&folded)[kSums], Term term) {
  constexpr int kBlocks = kChainBlocks<R>;
  Block<R> chains[kBlocks][kSums] = {};
  int64_t column = begin;
  for (; column + kStep<R> <= end; column += kStep<R>) {
    if constexpr (requires { term.step(column, chains); }) {
      term.step(column, chains);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; i++) term(column + i * kLanes<R>, FullBlock{}, chains[i]);
    }
  }
  if (kTail == Tail::unrolled && column < end) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) {
      if (column + kLanes<R> <= end) {
        term(column, FullBlock{}, chains[i]);
      } else if (column < end) {
        term(column, PartialBlock{end - column}, chains[i]);
      }
      column += kLanes<R>;
    }
  } else if (kTail == Tail::looped && column < end) {
    // The loop works on a copy, as the chains themselves would otherwise be in memory from the beginning. The copy
    // avoids memcpy, whose steps are shorter than a register.
    Block<R> in_memory[kBlocks][kSums];
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) {
      for (int k = 0; k < kSums; k++) in_memory[i][k] = chains[i][k];
    }
    int i = 0;
    for_each_block<R>(column, end,
                      [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA { term(column, extent, in_memory[i++]); });
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) {
      for (int k = 0; k < kSums; k++) chains[i][k] = in_memory[i][k];
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kSums; k++) {
    Block<R> chain[kBlocks];
    for (int i = 0; i < kBlocks; i++) chain[i] = chains[i][k];
    folded[k] = fold_chains<R>(chain);
  }
}

// Computes one sum; term(column, whole_or_part, accumulator) returns the new accumulator.
template <class R, Tail kTail, class Term>
NORMOPS_INLINE Folded<R> fold_span(int64_t begin, int64_t end, Term term) {
  Folded<R> folded[1];
  fold_span<R, kTail>(begin, end, folded, [&](int64_t column, auto extent, Block<R>(&sum)[1]) NORMOPS_INLINE_LAMBDA {
    sum[0] = term(column, extent, sum[0]);
  });
  return folded[0];
}

// Returns rstd = 1 / sqrt(mean(h^2) + eps). Operations per span or row use double, which costs nothing and keeps the
// error bound of one span. The sum over the row is rounded, so that a sum that is an input gives the same rstd.
template <class R>
NORMOPS_INLINE compute_t<R> rstd_of(compute_t<R> square_sum, int64_t cols, double eps) {
  const double mean = static_cast<double>(square_sum) / static_cast<double>(cols);
  return static_cast<compute_t<R>>(1 / std::sqrt(mean + eps));
}

// Returns -c, with c = rstd^3 * mean(dy * w * h), from the sum of these products.
template <class R>
NORMOPS_INLINE compute_t<R> minus_c_of(compute_t<R> dot, compute_t<R> rstd, int64_t cols) {
  const double rstd_cubed = static_cast<double>(rstd) * rstd * rstd;
  const double mean = static_cast<double>(dot) / static_cast<double>(cols);
  return static_cast<compute_t<R>>(-rstd_cubed * mean);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
