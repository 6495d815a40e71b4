// The loops of the forward kernels. For each row h, which a RowOp computes from its tensors:
//   y = h * rstd * scale, rstd = 1 / sqrt(mean(h^2) + eps)
// Read from the end: forward_rows() divides the rows of a call into runs in which all tensors have fixed strides.
// process_tiles() sums and writes the rows of a run. WrittenRow computes and writes the blocks of a row.
#include "row_access.inl"
#include "row_config.h"
#include "row_sums.inl"
#include "row_table.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Selects when software prefetches the row after the current one.
enum class Ahead { when_non_temporal, when_summed, when_written };

// A RowOp is a row of an operator: pointers into its tensors, and functions that compute blocks from them. T is the
// type of the output, R the type of the packed order. It has
//   kTensors: the tensors other than output and scale; with square_sum if sums may be inputs or outputs
//   kComputeBound: whether computing blocks takes most of the time; one instance then handles more cases
//   kOneLoop: whether one loop handles all cases, for rows that are rarely narrow or have rounded intermediates;
//     narrow rows of a scaled sum would take 1.2 of the time
//   kAhead
//   kFetchesOutput: whether the output's row is prefetched while an untiled row is summed
//   kPairing: how finish() pairs columns
//   Shared: the members that all rows share, constructed from the arguments
//   a constructor (rows, const Shared&, r) for row r of a tile; rows.row<kInput, const T>() is that row of the input
//   h<kSums>(column, extent): a block of h, for the sum (kSums) or to be normalized
//   finish(parts, y, column, extent), optional: turns normalized blocks times the scale into outputs; the first of
//     parts.kCount blocks begins with `column`
//   prefetch(column)
template <class T, class R = T>
struct RowOp {
  using Output = T;
  using Element = R;
  static constexpr bool kComputeBound = false, kOneLoop = false, kFetchesOutput = false;
  static constexpr Ahead kAhead = Ahead::when_non_temporal;
  static constexpr Pairing kPairing = Pairing::none;
  struct Shared {
    explicit Shared(const CpuArgs&) {}
  };
};

// Returns a term for fold_span, which adds the squares of a block of h to an accumulator.
template <class RowOp>
NORMOPS_INLINE auto squares_of(const RowOp& row) {
  return [row](int64_t column, auto extent, const Block<typename RowOp::Element>& sum) NORMOPS_INLINE_LAMBDA {
    const auto h = row.template h<true>(column, extent);
    return fma(h, h, sum);
  };
}

// A row of the input.
template <class T>
struct InputRow : RowOp<T> {
  const T* x;

  template <class Rows>
  explicit NORMOPS_INLINE InputRow(const Rows& rows) : x(rows.template row<kInput, const T>()) {}
  template <bool, class Extent>
  NORMOPS_INLINE Block<T> h(int64_t column, Extent extent) const {
    return load<T>(x + column, extent);
  }
  NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x + column); }
};

// Returns whether rows of T have rounded intermediate results.
template <class T>
NORMOPS_INLINE bool casts(Rounding rounding) {
  return sizeof(T) == 2 && rounding.any();
}

// Writes a row whose sum is known: h * rstd * w, or the result of finish() on that. kCasts: see casts().
template <class RowOp, class StorePolicy, bool kCasts>
struct WrittenRow {
  using T = typename RowOp::Output;
  using R = typename RowOp::Element;
  static constexpr bool kFinishes = requires { &RowOp::template finish<SingleBlock, FullBlock>; };
  RowOp row;
  const compute_t<R>* scale;
  T* y;
  Block<R> rstd;
  Rounding rounding;
  StorePolicy non_temporal;

  template <class Parts, class Extent>
  NORMOPS_INLINE void form(const Parts& parts, int64_t column, Extent extent, Block<R> (&blocks)[Parts::kCount]) const {
#pragma GCC unroll 2
    for (int p = 0; p < Parts::kCount; p++) {
      const Block<R> h = row.template h<false>(parts.column(column, p), extent);
      blocks[p] = round_if(h * rstd, rounding.normalized) * load_packed<R>(scale + parts.packed(column, p));
      if constexpr (kFinishes) blocks[p] = round_if(blocks[p], rounding.multiplied);
    }
    if constexpr (kFinishes) row.finish(parts, blocks, column, extent);
  }

  template <class Parts, class Extent>
  NORMOPS_INLINE void store(const Parts& parts, int64_t column, Extent extent,
                            const Block<R> (&blocks)[Parts::kCount]) const {
#pragma GCC unroll 2
    for (int p = 0; p < Parts::kCount; p++) {
      NORMOPS_ISA::store(y + parts.column(column, p), blocks[p], extent, non_temporal);
    }
  }

  // Writes columns [begin, end), and calls prefetch(column) for each block.
  template <Tail kTail, class Prefetch>
  NORMOPS_INLINE void write(int64_t begin, int64_t end, Prefetch prefetch) const {
    RotaryColumns paired;
    if constexpr (RowOp::kPairing != Pairing::none) paired = row.paired();
    each_segment<R, RowOp::kPairing>(paired, begin, end,
                                     [=, *this](const auto& parts, int64_t begin, int64_t end)
                                         NORMOPS_INLINE_LAMBDA { write_segment<kTail>(parts, begin, end, prefetch); });
  }

 private:
  static NORMOPS_INLINE Block<R> round_if(const Block<R>& block, bool is_wanted) {
    if constexpr (kCasts) {
      if (is_wanted) return rounded<T>(block);
    }
    return block;
  }

  // Loads several blocks before storing them: a load waits for an earlier store to an address with the same low 12
  // bits. Tensors of a power of two bytes that are allocated one after another often differ in those bits by 64 or 128.
  template <Tail kTail, class Parts, class Prefetch>
  NORMOPS_INLINE void write_segment(const Parts& parts, int64_t column, int64_t end, Prefetch prefetch) const {
    constexpr int kCount = Parts::kCount, kBlocks = kChainBlocks<R> / kCount;
    const auto form_next = [&](int64_t column, auto extent, Block<R>(&blocks)[kCount]) NORMOPS_INLINE_LAMBDA {
      for (int p = 0; p < kCount; p++) prefetch(parts.column(column, p));
      form(parts, column, extent, blocks);
    };
    if constexpr (loads_ahead(NORMOPS_VECTOR_BYTES)) {
      for (; column + kBlocks * kLanes<R> <= end; column += kBlocks * kLanes<R>) {
        Block<R> blocks[kBlocks][kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kBlocks; i++) form_next(column + i * kLanes<R>, FullBlock{}, blocks[i]);
        // The nop separates the stores from the loads. Zen 4 then takes a quarter less time if the output is not in the
        // caches, for an unknown reason; docs/notes/cpu.md has the measurements.
        if constexpr (NORMOPS_VECTOR_BYTES == 64) asm volatile("nop");
#pragma GCC unroll 4
        for (int i = 0; i < kBlocks; i++) store(parts, column + i * kLanes<R>, FullBlock{}, blocks[i]);
      }
      if constexpr (kTail == Tail::none && RowOp::kPairing == Pairing::none) return;
    }
    for_each_block<R>(column, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      Block<R> blocks[kCount];
      form_next(column, extent, blocks);
      store(parts, column, extent, blocks);
    });
  }
};

template <bool kCasts, class RowOp, class StorePolicy>
NORMOPS_INLINE auto written_row(const CurrentRows<RowOp>& rows, const typename RowOp::Shared& shared, int r,
                                compute_t<typename RowOp::Element> rstd, Rounding rounding, StorePolicy non_temporal) {
  using R = typename RowOp::Element;
  return WrittenRow<RowOp, StorePolicy, kCasts>{RowOp(rows, shared, r),
                                                rows.template row<kWeight, const compute_t<R>>(),
                                                rows.template row<kOutput, typename RowOp::Output>(),
                                                broadcast<R>(rstd),
                                                rounding,
                                                non_temporal};
}

// Writes the first of `rows`.
template <bool kCasts, Tail kTail, class RowOp, class StorePolicy>
NORMOPS_INLINE void write_row(const CurrentRows<RowOp>& rows, const typename RowOp::Shared& shared, int r,
                              compute_t<typename RowOp::Element> rstd, Rounding rounding, int64_t cols,
                              StorePolicy non_temporal) {
  // GCC 12 emits 2% more code for all kernels if this is const.
  auto row = written_row<kCasts>(rows, shared, r, rstd, rounding, non_temporal);
  const RowOp next(NextRows<RowOp>{rows}, shared, r);
  row.template write<kTail>(0, cols, [next, non_temporal](int64_t column) NORMOPS_INLINE_LAMBDA {
    const bool is_wanted =
        RowOp::kAhead == Ahead::when_non_temporal ? non_temporal : RowOp::kAhead == Ahead::when_written;
    if (is_wanted) next.prefetch(column);
  });
}

template <class RowOp>
constexpr bool kHasSums = place_of<RowOp>(kSquareSum) >= 0;

template <class RowOp>
constexpr bool kMayTile = !kHasSums<RowOp> && !RowOp::kOneLoop;

// Processes tiles of kRows rows: each tile is summed, then written. All addresses stay in registers: a load waits for
// any pending store to an address with the same low 12 bits. Pending stores cover most such addresses, and a spilled
// pointer delays all loads through it. Closures here call no other closures: GCC 12 would keep the rows on the stack
// (1.1 of the time of narrow rows).
template <int kRows, bool kCasts, Tail kTail, class RowOp, class StorePolicy>
[[gnu::noinline]] void process_tiles(CurrentRows<RowOp> rows, typename RowOp::Shared shared, Rounding rounding,
                                     StrideRuns& runs, int64_t tiles, int64_t cols, int64_t size, double eps,
                                     StorePolicy non_temporal) {
  using R = typename RowOp::Element;
  const auto fold = [cols, &shared, non_temporal](const CurrentRows<RowOp>& rows, int r,
                                                  int64_t begin) NORMOPS_INLINE_LAMBDA {
    const auto squares = squares_of(RowOp(rows, shared, r));
    const RowOp next(NextRows<RowOp>{rows}, shared, r);
    const auto* const y = rows.template row<kOutput, typename RowOp::Output>();
    return fold_span<R, kTail>(begin, span_end(begin, cols),
                               [=](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
                                 if (RowOp::kAhead == Ahead::when_summed) next.prefetch(column);
                                 if (RowOp::kFetchesOutput && kRows == 1 && !non_temporal) prefetch(y + column);
                                 return squares(column, extent, sum);
                               });
  };
  if constexpr (kHasSums<RowOp>) {
    for_each_row(runs, tiles, rows, [&](int) NORMOPS_INLINE_LAMBDA {
      const auto* const sum = rows.template row<kSquareSum, const compute_t<R>>();
      const compute_t<R> rstd = rstd_of<R>(canonical_number<R>(*sum), size, eps);
      write_row<kCasts, kTail>(rows, shared, 0, rstd, rounding, cols, non_temporal);
    });
  } else if constexpr (kRows == 1) {
    for_each_row(runs, tiles, rows, [&](int) NORMOPS_INLINE_LAMBDA {
      // Peels the first span: with one loop over all, GCC 12 spills two of AVX2's accumulators (a fifth slower).
      double square_sum = sum_of<R>(fold(rows, 0, 0));
      for (int64_t begin = kSpan; begin < cols; begin += kSpan) square_sum += sum_of<R>(fold(rows, 0, begin));
      write_row<kCasts, kTail>(rows, shared, 0, rstd_of<R>(square_sum, size, eps), rounding, cols, non_temporal);
    });
  } else {
    auto summed = rows;
    StrideRuns to_sum = runs;
    for (; tiles > 0; tiles--) {
      Folded<R> folded[kRows];
      compute_t<R> rstd[kRows];
      for_each_row(to_sum, kRows, summed, [&](int r) NORMOPS_INLINE_LAMBDA { folded[r] = fold(summed, r, 0); });
      for (int r = 0; r < kRows; r += 4) sums_of<R>(folded + r, rstd + r);
      for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(rstd[r], size, eps);
      for_each_row(runs, kRows, rows, [&](int r) NORMOPS_INLINE_LAMBDA {
        write_row<kCasts, kTail>(rows, shared, r, rstd[r], rounding, cols, non_temporal);
      });
    }
  }
}

// Writes the sums of squares of rows, with the same bits as when the rows are normalized.
template <class RowOp>
void sum_tiles(CurrentRows<RowOp> rows, const typename RowOp::Shared& shared, StrideRuns& runs, int64_t cols) {
  using R = typename RowOp::Element;
  for_each_row(runs, runs.count, rows, [&](int) NORMOPS_INLINE_LAMBDA {
    double square_sum = 0;
    for (int64_t begin = 0; begin < cols; begin += kSpan) {
      const auto squares = squares_of(RowOp(rows, shared, 0));
      square_sum += sum_of<R>(fold_span<R, Tail::looped>(begin, span_end(begin, cols), squares));
    }
    *rows.template row<kSquareSum, compute_t<R>>() = static_cast<compute_t<R>>(square_sum);
  });
}

// Calls visit.template operator()<rows of a tile, casts, tail>(store policy) with the loop for these rows:
//   rows                                            casts  store policy  tail
//   rounded intermediates; all of kOneLoop          yes    at run time   looped
//   other compute-bound operators and rare types    no     at run time   looped
//   non-temporal stores, which hide a tail's cost   no     NonTemporal   looped
//   the rest                                        no     Cached        looped or none
template <class RowOp, class Visit>
NORMOPS_INLINE void dispatch_loop(bool casts, bool non_temporal, bool in_tiles, bool is_whole, Visit visit) {
  using T = typename RowOp::Output;
  const auto with = [&]<bool kCasts, Tail kTail>(auto policy) NORMOPS_INLINE_LAMBDA {
    if constexpr (kMayTile<RowOp>) {
      if (in_tiles) return visit.template operator()<kForwardTile, kCasts, kTail>(policy);
    }
    visit.template operator()<1, kCasts, kTail>(policy);
  };
  if constexpr (sizeof(T) == 2) {
    if (RowOp::kOneLoop || casts) return with.template operator()<true, Tail::looped>(non_temporal);
  }
  if constexpr (sizeof(T) == 2 && RowOp::kOneLoop) {
    return;
  } else if constexpr (branches_at_run_time<RowOp, T>()) {
    with.template operator()<false, Tail::looped>(non_temporal);
  } else if (non_temporal) {
    with.template operator()<false, Tail::looped>(NonTemporal{});
  } else if (is_whole) {
    with.template operator()<false, Tail::none>(Cached{});
  } else {
    with.template operator()<false, Tail::looped>(Cached{});
  }
}

template <class RowOp>
void forward_rows(const CpuArgs& args, int64_t begin, int64_t end) {
  using T = typename RowOp::Output;
  using R = typename RowOp::Element;
  const int64_t cols = args.cols, bytes = cols * static_cast<int64_t>(sizeof(R));
  const bool non_temporal =
      args.non_temporal && begins_with_lines(args[kOutput]) && scale_layout<RowOp>(args).has_lines(sizeof(T));
  const bool is_tiled = kMayTile<RowOp> && bytes <= tiled_bytes(NORMOPS_VECTOR_BYTES, sizeof(R),
                                                                RowOp::kComputeBound ? 0 : (end - begin) * bytes);
  const typename RowOp::Shared shared(args);
  RowTable<RowOp> tensors(args, begin);
  while (begin < end) {
    StrideRuns runs = common_runs(end - begin, [&](auto visit) NORMOPS_INLINE_LAMBDA { tensors.each(visit); });
    const bool in_tiles = is_tiled && runs.count >= kForwardTile;
    if (in_tiles) runs.count -= runs.count % kForwardTile;
    const CurrentRows<RowOp> rows = tensors.take_strided(runs.count);
    begin += runs.count;
    if constexpr (kHasSums<RowOp>) {
      if (args.sums == Sums::output) {
        sum_tiles(rows, shared, runs, cols);
        continue;
      }
    }
    dispatch_loop<RowOp>(casts<T>(args.rounding), non_temporal, in_tiles, cols % kStep<R> == 0,
                         [&]<int kRows, bool kCasts, Tail kTail>(auto policy) {
                           process_tiles<kRows, kCasts, kTail>(rows, shared, args.rounding, runs, runs.count / kRows,
                                                               cols, args.size, args.eps, policy);
                         });
  }
  if (non_temporal) finish_non_temporal();
}

// The kernels of an operator's variants: dispatch_row_op(args, visit) calls visit.template operator()<RowOp>() with the
// selected RowOp.
template <class Variants>
struct ForwardKernelsOf {
  static void rows(const CpuArgs& args, int64_t begin, int64_t end) {
    Variants::dispatch_row_op(args, [&]<class RowOp>() { forward_rows<RowOp>(args, begin, end); });
  }
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
