// What the forward kernels have in common: the rows h that an Operator forms are summed, then normalized and written:
//   y = h * rstd * scale, rstd = 1 / sqrt(mean(h^2) + eps)
// From below: forward_rows() cuts the rows of a call into runs in which all tensors advance by fixed strides,
// process_tiles() walks over such a run, WrittenRow forms and writes a row's blocks.
#include "row_access.inl"
#include "row_config.h"
#include "row_sums.inl"
#include "row_table.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// When the row after the current one is prefetched, beside what the processor fetches by itself.
enum class Ahead { when_streaming, when_summed, when_written };

// An Operator is a row: where each of its tensors has it, and what else its blocks are made of. T is the type of the
// output, R that in whose order blocks are held. It has
//   kTensors: those that it has beside the output and the scale
//   kComputeBound: whether most time goes to forming blocks, and neither to memory nor to choosing between cases at run
//     time; then there is less code, of which each piece serves more cases
//   kOneLoop: whether there is one loop for all cases, for rows that are rarely narrow or rounded on the way
//   kAhead
//   kFetchesOutput: whether the row of the output is prefetched while a row is summed that goes by itself
//   kPairing: how columns are finished
//   WithSums, if sums may be given or wanted: the same, with square_sum among its tensors
//   Shared: what all rows have in common, made of the arguments
//   a constructor of (rows, const Shared&, r), of row r of a tile; rows.row<kInput, const T>() finds that of the input
//   h<kSums>(column, extent): the block that is summed, and, when the row is written, normalized
//   finish(parts, y, column, extent), if it has that: makes of normalized blocks times the scale, as many as the parts
//     are and of which the first begins with `column`, what is written
//   prefetch(column)
template <class T, class R = T>
struct Operator {
  using Output = T;
  using Element = R;
  static constexpr bool kComputeBound = false, kOneLoop = false, kFetchesOutput = false;
  static constexpr Ahead kAhead = Ahead::when_streaming;
  static constexpr Pairing kPairing = Pairing::none;
  struct Shared {
    explicit Shared(const CpuArgs&) {}
  };
};

// A term for fold_span, which adds the squares of a block to an accumulator.
template <class Operator>
NORMOPS_INLINE auto squares_of(const Operator& row) {
  return [row](int64_t column, auto extent, const Block<typename Operator::Element>& sum) NORMOPS_INLINE_LAMBDA {
    const auto h = row.template h<true>(column, extent);
    return fma(h, h, sum);
  };
}

// A row of the input.
template <class T>
struct InputRow : Operator<T> {
  const T* x;

  template <class Rows>
  explicit NORMOPS_INLINE InputRow(const Rows& rows) : x(rows.template row<kInput, const T>()) {}
  template <bool, class Extent>
  NORMOPS_INLINE Block<T> h(int64_t column, Extent extent) const {
    return load<T>(x + column, extent);
  }
  NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x + column); }
};

// Whether rows of T are rounded on the way to being written.
template <class T>
NORMOPS_INLINE bool casts(Casting casting) {
  return sizeof(T) == 2 && casting.any();
}

// A row whose sum is known, to be written: h * rstd * w, or what the operator makes of it. kCasts: see casts().
template <class Operator, class StorePolicy, bool kCasts>
struct WrittenRow {
  using T = typename Operator::Output;
  using R = typename Operator::Element;
  static constexpr bool kFinishes = requires { &Operator::template finish<SingleBlock, Whole>; };
  Operator row;
  const compute_t<R>* scale;
  T* y;
  Block<R> rstd;
  Casting casting;
  StorePolicy streams;

  template <class Parts, class Extent>
  NORMOPS_INLINE void form(const Parts& parts, int64_t column, Extent extent, Block<R> (&blocks)[Parts::kCount]) const {
#pragma GCC unroll 2
    for (int p = 0; p < Parts::kCount; p++) {
      const Block<R> h = row.template h<false>(parts.column(column, p), extent);
      blocks[p] = cast(h * rstd, casting.normalized) * load_packed<R>(scale + parts.held(column, p));
      if constexpr (kFinishes) blocks[p] = cast(blocks[p], casting.multiplied);
    }
    if constexpr (kFinishes) row.finish(parts, blocks, column, extent);
  }

  template <class Parts, class Extent>
  NORMOPS_INLINE void store(const Parts& parts, int64_t column, Extent extent,
                            const Block<R> (&blocks)[Parts::kCount]) const {
#pragma GCC unroll 2
    for (int p = 0; p < Parts::kCount; p++) {
      NORMOPS_ISA::store(y + parts.column(column, p), blocks[p], extent, streams);
    }
  }

  // Writes columns [begin, end), and calls prefetch(column) for each block.
  template <Tail kTail, class Prefetch>
  NORMOPS_INLINE void write(int64_t begin, int64_t end, Prefetch prefetch) const {
    RotaryColumns paired;
    if constexpr (Operator::kPairing != Pairing::none) paired = row.paired();
    each_segment<R, Operator::kPairing>(
        paired, begin, end, [=, *this](const auto& parts, int64_t begin, int64_t end) NORMOPS_INLINE_LAMBDA {
          write_segment<kTail>(parts, begin, end, prefetch);
        });
  }

 private:
  static NORMOPS_INLINE Block<R> cast(const Block<R>& block, bool is_wanted) {
    if constexpr (kCasts) {
      if (is_wanted) return rounded<T>(block);
    }
    return block;
  }

  // The loads of several blocks come before their stores: a load that follows a store to an address with the same low
  // 12 bits waits for it, and tensors of a power of two bytes that are allocated one after another often differ in
  // those bits by 64 or 128.
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
        for (int i = 0; i < kBlocks; i++) form_next(column + i * kLanes<R>, Whole{}, blocks[i]);
        // The nop keeps the stores from following the loads at once. Where the output is not in the caches, Zen 4 then
        // takes a quarter less time; docs/notes/cpu.md tells what was measured. Why is not known.
        if constexpr (NORMOPS_VECTOR_BYTES == 64) asm volatile("nop");
#pragma GCC unroll 4
        for (int i = 0; i < kBlocks; i++) store(parts, column + i * kLanes<R>, Whole{}, blocks[i]);
      }
      if constexpr (kTail == Tail::none && Operator::kPairing == Pairing::none) return;
    }
    for_each_block<R>(column, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      Block<R> blocks[kCount];
      form_next(column, extent, blocks);
      store(parts, column, extent, blocks);
    });
  }
};

template <bool kCasts, class Operator, class StorePolicy>
NORMOPS_INLINE auto written_row(const CurrentRows<Operator>& rows, const typename Operator::Shared& shared, int r,
                                compute_t<typename Operator::Element> rstd, Casting casting, StorePolicy streams) {
  using R = typename Operator::Element;
  return WrittenRow<Operator, StorePolicy, kCasts>{Operator(rows, shared, r),
                                                   rows.template row<kWeight, const compute_t<R>>(),
                                                   rows.template row<kOutput, typename Operator::Output>(),
                                                   broadcast<R>(rstd),
                                                   casting,
                                                   streams};
}

// Writes the first of `rows`.
template <bool kCasts, Tail kTail, class Operator, class StorePolicy>
NORMOPS_INLINE void write_row(const CurrentRows<Operator>& rows, const typename Operator::Shared& shared, int r,
                              compute_t<typename Operator::Element> rstd, Casting casting, int64_t cols,
                              StorePolicy streams) {
  // Not const: GCC 12 makes two hundredths more of all kernels then.
  auto row = written_row<kCasts>(rows, shared, r, rstd, casting, streams);
  const Operator next(NextRows<Operator>{rows}, shared, r);
  row.template write<kTail>(0, cols, [next, streams](int64_t column) NORMOPS_INLINE_LAMBDA {
    const bool is_wanted =
        Operator::kAhead == Ahead::when_streaming ? streams : Operator::kAhead == Ahead::when_written;
    if (is_wanted) next.prefetch(column);
  });
}

template <class Operator>
constexpr bool kHasSums = place_of<Operator>(kSquareSum) >= 0;

// Tiles of kRows rows: each is summed, then written. All addresses stay in registers, which matters: a load waits for
// any store that is still on its way to memory and whose address has the same low 12 bits. Those stores cover most such
// addresses, and a pointer that has to be loaded holds up all that is read through it. So no closure is called by
// another one here: GCC 12 would keep the rows on the stack (1.1 of the time of narrow ones).
template <int kRows, bool kCasts, Tail kTail, class Operator, class StorePolicy>
[[gnu::noinline]] void process_tiles(CurrentRows<Operator> rows, typename Operator::Shared shared, Casting casting,
                                     StrideRuns& stretches, int64_t tiles, int64_t cols, int64_t size, double eps,
                                     StorePolicy streams) {
  using R = typename Operator::Element;
  const auto fold = [cols, &shared, streams](const CurrentRows<Operator>& rows, int r,
                                             int64_t begin) NORMOPS_INLINE_LAMBDA {
    const auto squares = squares_of(Operator(rows, shared, r));
    const Operator next(NextRows<Operator>{rows}, shared, r);
    const auto* const y = rows.template row<kOutput, typename Operator::Output>();
    return fold_span<R, kTail>(begin, span_end(begin, cols),
                               [=](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
                                 if (Operator::kAhead == Ahead::when_summed) next.prefetch(column);
                                 if (Operator::kFetchesOutput && kRows == 1 && !streams) prefetch(y + column);
                                 return squares(column, extent, sum);
                               });
  };
  if constexpr (kHasSums<Operator>) {
    for_each_row(stretches, tiles, rows, [&](int) NORMOPS_INLINE_LAMBDA {
      const auto* const sum = rows.template row<kSquareSum, const compute_t<R>>();
      const compute_t<R> rstd = rstd_of<R>(admitted_number<R>(*sum), size, eps);
      write_row<kCasts, kTail>(rows, shared, 0, rstd, casting, cols, streams);
    });
  } else if constexpr (kRows == 1) {
    for_each_row(stretches, tiles, rows, [&](int) NORMOPS_INLINE_LAMBDA {
      // The first span by itself: beside a loop over all, GCC 12 spills two of AVX2's accumulators (a fifth).
      double square_sum = sum_of<R>(fold(rows, 0, 0));
      for (int64_t begin = kSpan; begin < cols; begin += kSpan) square_sum += sum_of<R>(fold(rows, 0, begin));
      write_row<kCasts, kTail>(rows, shared, 0, rstd_of<R>(square_sum, size, eps), casting, cols, streams);
    });
  } else {
    auto summed = rows;
    StrideRuns to_sum = stretches;
    for (; tiles > 0; tiles--) {
      Folded<R> folded[kRows];
      compute_t<R> rstd[kRows];
      for_each_row(to_sum, kRows, summed, [&](int r) NORMOPS_INLINE_LAMBDA { folded[r] = fold(summed, r, 0); });
      for (int r = 0; r < kRows; r += 4) sums_of<R>(folded + r, rstd + r);
      for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(rstd[r], size, eps);
      for_each_row(stretches, kRows, rows, [&](int r) NORMOPS_INLINE_LAMBDA {
        write_row<kCasts, kTail>(rows, shared, r, rstd[r], casting, cols, streams);
      });
    }
  }
}

// Writes the sums of the squares of rows, as they are formed where these are normalized.
template <class Operator>
void sum_tiles(CurrentRows<Operator> rows, const typename Operator::Shared& shared, StrideRuns& stretches,
               int64_t cols) {
  using R = typename Operator::Element;
  for_each_row(stretches, stretches.count, rows, [&](int) NORMOPS_INLINE_LAMBDA {
    double square_sum = 0;
    for (int64_t begin = 0; begin < cols; begin += kSpan) {
      const auto squares = squares_of(Operator(rows, shared, 0));
      square_sum += sum_of<R>(fold_span<R, Tail::looped>(begin, span_end(begin, cols), squares));
    }
    *rows.template row<kSquareSum, compute_t<R>>() = static_cast<compute_t<R>>(square_sum);
  });
}

template <class Operator>
void forward_rows(const CpuArgs& args, int64_t begin, int64_t end) {
  using T = typename Operator::Output;
  using R = typename Operator::Element;
  if constexpr (!kHasSums<Operator> && requires { typename Operator::WithSums; }) {
    if (args.sums != Sums::formed) return forward_rows<typename Operator::WithSums>(args, begin, end);
  }
  const int64_t cols = args.cols, bytes = cols * static_cast<int64_t>(sizeof(R));
  const bool streams =
      args.stream && begins_with_lines(args[kOutput]) && held_order<Operator>(args).has_lines(sizeof(T));
  constexpr bool kMayTile = !kHasSums<Operator> && !Operator::kOneLoop;
  const bool is_tiled = kMayTile && bytes <= tiled_bytes(NORMOPS_VECTOR_BYTES, sizeof(R),
                                                         Operator::kComputeBound ? 0 : (end - begin) * bytes);
  const typename Operator::Shared shared(args);
  OperatorRows<Operator> tensors(args, begin);
  while (begin < end) {
    StrideRuns stretches =
        common_stretches(end - begin, [&](auto visit) NORMOPS_INLINE_LAMBDA { tensors.each(visit); });
    const bool in_tiles = is_tiled && stretches.count >= kForwardTile;
    if (in_tiles) stretches.count -= stretches.count % kForwardTile;
    const CurrentRows<Operator> rows = tensors.take_strided(stretches.count);
    begin += stretches.count;
    if constexpr (kHasSums<Operator>) {
      if (args.sums == Sums::wanted) {
        sum_tiles(rows, shared, stretches, cols);
        continue;
      }
    }
    choose<sizeof(T) == 2 && !Operator::kOneLoop>(casts<T>(args.casting), [&](auto casts) {
      // Rounding takes more than choosing.
      constexpr bool kCasts = sizeof(T) == 2 && !std::is_same_v<decltype(casts), std::false_type>,
                     kChooses = branches_at_run_time<Operator, T>() || kCasts;
      choose<!kChooses>(streams, [&](auto way) {
        choose<kMayTile>(in_tiles, [&](auto tiled) {
          constexpr int kRows = std::is_same_v<decltype(tiled), std::true_type> ? kForwardTile : 1;
          // Beyond the caches, the rest costs nothing.
          constexpr bool kFindsRest = kChooses || std::is_same_v<decltype(way), Stream>;
          choose<!kFindsRest>(cols % kStep<R> == 0, [&](auto is_whole) {
            constexpr Tail kTail = std::is_same_v<decltype(is_whole), std::true_type> ? Tail::none : Tail::looped;
            process_tiles<kRows, kCasts, kTail>(rows, shared, args.casting, stretches, stretches.count / kRows, cols,
                                                args.size, args.eps, way);
          });
        });
      });
    });
  }
  if (streams) finish_stream();
}

template <class Operator>
void forward_sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  const auto rows = OperatorRows<Operator>(args, row).take_strided(1);
  const typename Operator::Shared shared(args);
  sum_spans<typename Operator::Element>(args.cols, begin, end, squares, squares_of(Operator(rows, shared, 0)));
}

template <class Operator>
void forward_columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  using R = typename Operator::Element;
  const auto rows = OperatorRows<Operator>(args, row).take_strided(1);
  const typename Operator::Shared shared(args);
  // Whether results are rounded on the way is found out for each block: rows that threads share are few.
  const compute_t<R> rstd = rstd_of<R>(square_sum, args.size, args.eps);
  written_row<sizeof(typename Operator::Output) == 2>(rows, shared, 0, rstd, args.casting, Cached{})
      .template write<Tail::looped>(begin, end, [](int64_t) NORMOPS_INLINE_LAMBDA {});
}

// The kernels of an operator's variants: choose(args, visit) calls visit.template operator()<Operator>() with one.
template <class Variants>
struct Forward {
  static void rows(const CpuArgs& args, int64_t begin, int64_t end) {
    Variants::choose(args, [&]<class Operator>() { forward_rows<Operator>(args, begin, end); });
  }
  static void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
    Variants::choose(args, [&]<class Operator>() { forward_sums<Operator>(args, row, begin, end, squares); });
  }
  static void columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
    Variants::choose(args, [&]<class Operator>() { forward_columns<Operator>(args, row, square_sum, begin, end); });
  }
  static constexpr ForwardKernels kKernels = {rows, sums, columns};
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
