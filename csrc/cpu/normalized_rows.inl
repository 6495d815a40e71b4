// The writing half of the forward kernels: rows whose rstd is known, by themselves or while other rows are summed.
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Whether the loads of several blocks come before their stores, where there are registers for them: a load that follows
// a store to an address with the same low 12 bits waits for it, and tensors of a power of two bytes that are allocated
// one after another often differ in those bits by 64 or 128.
constexpr bool kLoadsAhead = NORMOPS_VECTOR_BYTES == 64;

// Rows whose rstd is known, to be written as y = finished(h * rstd * w). They share the scale.
template <class T, class R, class Numbers, int kRows, class Way>
struct NormalizedRows {
  using Element = R;
  static constexpr int kCount = kRows;

  Way streams;
  const compute_t<R>* scale;
  Numbers h[kRows];
  T* y[kRows];
  Block<R> rstd[kRows];

  // Forms a block of each row.
  template <class Extent>
  NORMOPS_INLINE void normalize(int64_t column, Extent extent, Block<R> (&result)[kRows]) const {
    const Block<R> w = load_held<R>(scale + column);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      result[r] = h[r].finished(h[r].block(column, extent) * rstd[r] * w, column, extent);
    }
  }

  template <class Extent>
  NORMOPS_INLINE void store_block(int64_t column, Extent extent, const Block<R> (&result)[kRows]) const {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) store(y[r] + column, result[r], extent, streams);
  }

  // Writes kStep columns of each row. All loads, and what between() does, come before all stores.
  template <class Between>
  NORMOPS_INLINE void write_step(int64_t column, Between between) const {
    constexpr int kBlocks = kChainBlocks<R>;
    Block<R> results[kBlocks][kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) normalize(column + i * kLanes<R>, Whole{}, results[i]);
    between();
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) store_block(column + i * kLanes<R>, Whole{}, results[i]);
  }

  template <Rest kRest = Rest::looped>
  NORMOPS_INLINE void write_columns(int64_t begin, int64_t end) const {
    if constexpr (kLoadsAhead) {
      // The nop keeps the stores from following the loads at once. Where the output is not in the caches, Zen 4 then
      // takes a quarter less time; docs/performance-notes.md tells what was measured. Why is not known.
      for (; begin + kStep<R> <= end; begin += kStep<R>) write_step(begin, [] { asm volatile("nop"); });
      if constexpr (kRest == Rest::none) return;
    }
    for_each_block<R>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      Block<R> result[kRows];
      normalize(column, extent, result);
      store_block(column, extent, result);
    });
  }
};

// A term of fold_span that writes rows while others are summed, so that memory is read and written all the time.
template <class Written, class Term>
struct WhileWriting {
  using R = typename Written::Element;
  static constexpr int kRows = Written::kCount;

  Written written;
  Term term;

  template <class Extent, class Sums>
  NORMOPS_INLINE void operator()(int64_t column, Extent extent, Sums& sums) const {
    Block<R> result[kRows];
    written.normalize(column, extent, result);
    term(column, extent, sums);
    written.store_block(column, extent, result);
  }

  template <class Chains>
  NORMOPS_INLINE void step(int64_t column, Chains& chains) const
    requires(kLoadsAhead)
  {
    written.write_step(column, [&]() NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int i = 0; i < kChainBlocks<R>; i++) term(column + i * kLanes<R>, Whole{}, chains[i]);
    });
  }
};

template <class Written, class Term>
WhileWriting(Written, Term) -> WhileWriting<Written, Term>;

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
