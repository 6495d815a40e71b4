// What the forward kernels have in common: rows that come from a Source are summed, then normalized and written.
#include "row_access.inl"
#include "row_config.h"
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// What an epilogue has that says nothing else. An Epilogue makes of a row that has been summed what is written:
//   block(column, extent): what is normalized
//   static constexpr bool kFinishes: whether finish() changes anything
//   static constexpr Pairing kPairing: whether some columns are finished in pairs, those that `paired` tells
//   finish(parts, y, column, extent): turns normalized blocks times the scale, as many as the parts are, into what is
//     written. The first block begins with `column`.
template <class R>
struct Epilogue {
  static constexpr bool kFinishes = false;
  static constexpr Pairing kPairing = Pairing::none;
  static constexpr PairedColumns paired = {};

  template <class Extent>
  NORMOPS_INLINE void finish(const OnePart&, Block<R> (&)[1], int64_t, Extent) const {}
};

// For numbers that lie in memory, are normalized as they are, and written as they are then.
template <class R>
struct GivenNumbers : Epilogue<R> {
  const R* data;

  explicit GivenNumbers(const R* data) : data(data) {}
  template <class Extent>
  NORMOPS_INLINE Block<R> block(int64_t column, Extent extent) const {
    return load<R>(data + column, extent);
  }
};

// Of the row of T after the current one.
template <class T>
NORMOPS_INLINE void prefetch_next(const EvenRows& rows, int64_t column) {
  prefetch(rows.row + rows.stride + column * static_cast<int64_t>(sizeof(T)));
}

// When the row after the current one is prefetched, beside what the processor fetches by itself.
enum class Ahead { when_streaming, when_summed, when_written };

// A Source is where the rows come from that are summed and normalized. It has
//   using Element: the type in whose order blocks are held
//   static constexpr
//     kCostly: whether most time goes to forming blocks, and neither to memory nor to choosing between cases at run
//       time; then there is less code, of which each piece serves more cases
//     kAhead
//     kFetchesOutput: whether the row of the output is prefetched while a row is summed that goes by itself
//   a constructor of (const CpuArgs&, row)
//   each(visit): calls visit(iterator) for each of its tensors
//   next_even(count): the next rows, as Rows
//   static constexpr bool kGivesSums, if it does: whether Rows have the sum of the squares of each, so that none is
//     formed
// Rows have
//   each(visit): calls visit(EvenRows) for each tensor
//   row(r): the current Row, which is the r-th of its tile
//   rstd(eps), of the current one, if sums are given
//   prefetch(column): of the row after it
// A Row has
//   squares(): a term for fold_span, which adds the squares of a block to an accumulator
//   epilogue(): called when the squares have been summed
// This one's rows are those of the input.
template <class T>
class InputRows {
 public:
  using Element = T;
  static constexpr bool kCostly = false;
  static constexpr Ahead kAhead = Ahead::when_streaming;
  static constexpr bool kFetchesOutput = false;

  struct Row {
    const T* x;
    auto squares() const { return squares_of(x); }
    auto epilogue() const { return GivenNumbers<T>(x); }
  };

  struct Rows {
    EvenRows x;

    template <class Visit>
    void each(Visit visit) {
      visit(x);
    }
    Row row(int) const { return {x.at<const T>()}; }
    NORMOPS_INLINE void prefetch(int64_t column) const { prefetch_next<T>(x, column); }
  };

  InputRows(const CpuArgs& args, int64_t row) : x_(args[kInput], row) {}

  template <class Visit>
  void each(Visit visit) {
    visit(x_);
  }
  Rows next_even(int64_t count) { return {x_.next_even(count)}; }

 private:
  RowIterator x_;
};

template <class Source>
constexpr bool gives_sums() {
  if constexpr (requires { Source::kGivesSums; }) return Source::kGivesSums;
  return false;
}

// Where rows are written, their scales, and where results are rounded on the way.
template <class T, class R>
struct OutputRows {
  EvenRows y, scale;
  Casting casting;

  template <class Visit>
  void each(Visit visit) {
    visit(y);
    visit(scale);
  }
};

// The scales as rows of a tensor: those of the groups, one after another, over and over again.
template <class Source>
RowsArg scale_rows(const CpuArgs& args) {
  constexpr DType dtype = compute_dtype(kDType<typename Source::Element>);
  const int64_t groups = args.weight.groups;
  const RowLayout one = {1, {INT64_MAX}, {0}},
                  each = {2, {INT64_MAX / groups, groups}, {0, held_cols<Source>(args) * size_of(dtype)}};
  return {const_cast<void*>(args.scale), dtype, groups == 1 ? one : each};
}

// Whether rows of T are rounded on the way to being written.
template <class T>
NORMOPS_INLINE bool casts(Casting casting) {
  return sizeof(T) == 2 && casting.any();
}

// A row whose sum is known, to be written: what its epilogue makes of h * rstd * w. kCasts: see casts().
template <class T, class R, class Epilogue, class Way, bool kCasts>
struct WrittenRow {
  Epilogue epilogue;
  const compute_t<R>* scale;
  T* y;
  Block<R> rstd;
  Casting casting;
  Way streams;

  template <class Parts, class Extent>
  NORMOPS_INLINE void form(const Parts& parts, int64_t column, Extent extent, Block<R> (&blocks)[Parts::kCount]) const {
#pragma GCC unroll 2
    for (int p = 0; p < Parts::kCount; p++) {
      const Block<R> h = epilogue.block(parts.column(column, p), extent);
      blocks[p] = cast(h * rstd, casting.normalized) * load_held<R>(scale + parts.held(column, p));
      if constexpr (Epilogue::kFinishes) blocks[p] = cast(blocks[p], casting.multiplied);
    }
    epilogue.finish(parts, blocks, column, extent);
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
  template <Rest kRest, class Prefetch>
  NORMOPS_INLINE void write(int64_t begin, int64_t end, Prefetch prefetch) const {
    each_stretch<R, Epilogue::kPairing>(
        epilogue.paired, begin, end, [=, *this](const auto& parts, int64_t begin, int64_t end) NORMOPS_INLINE_LAMBDA {
          write_stretch<kRest>(parts, begin, end, prefetch);
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
  template <Rest kRest, class Parts, class Prefetch>
  NORMOPS_INLINE void write_stretch(const Parts& parts, int64_t column, int64_t end, Prefetch prefetch) const {
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
      if constexpr (kRest == Rest::none && Epilogue::kPairing == Pairing::none) return;
    }
    for_each_block<R>(column, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      Block<R> blocks[kCount];
      form_next(column, extent, blocks);
      store(parts, column, extent, blocks);
    });
  }
};

template <bool kCasts, class R, class Source, class T, class Way>
NORMOPS_INLINE auto written_row(const typename Source::Rows& rows, int r, const OutputRows<T, R>& outputs,
                                compute_t<R> rstd, Way streams) {
  const auto epilogue = rows.row(r).epilogue();
  return WrittenRow<T, R, std::remove_const_t<decltype(epilogue)>, Way, kCasts>{
      epilogue,
      outputs.scale.template at<const compute_t<R>>(),
      outputs.y.template at<T>(),
      broadcast<R>(rstd),
      outputs.casting,
      streams};
}

// Writes the first of `rows`.
template <bool kCasts, Rest kRest, class Source, class T, class R, class Way>
NORMOPS_INLINE void write_row(const typename Source::Rows& rows, int r, const OutputRows<T, R>& outputs,
                              compute_t<R> rstd, int64_t cols, Way streams) {
  // Not const: GCC 12 makes two hundredths more of all kernels then.
  auto row = written_row<kCasts, R, Source>(rows, r, outputs, rstd, streams);
  row.template write<kRest>(0, cols, [rows, streams](int64_t column) NORMOPS_INLINE_LAMBDA {
    const bool is_wanted = Source::kAhead == Ahead::when_streaming ? streams : Source::kAhead == Ahead::when_written;
    if (is_wanted) rows.prefetch(column);
  });
}

// The longest run of the next `rows` in which all tensors advance by fixed strides. `each` calls a function for the
// iterator of each tensor.
template <class Each>
NORMOPS_INLINE Stretches common_stretches(int64_t rows, Each each) {
  Stretches result = {INT64_MAX, INT64_MAX, rows};
  const auto lower = [](int64_t& number, int64_t bound)
                         NORMOPS_INLINE_LAMBDA { number = bound < number ? bound : number; };
  each([&](const auto& tensor) NORMOPS_INLINE_LAMBDA {
    lower(result.size, tensor.stretch());
    lower(result.left, tensor.stretch_left());
  });
  each([&](const auto& tensor) NORMOPS_INLINE_LAMBDA {
    const bool fits =
        tensor.stretch() == INT64_MAX || (tensor.stretch() == result.size && tensor.stretch_left() == result.left);
    lower(result.count, fits ? tensor.even_left() : result.left);
  });
  return result;
}

// Calls visit(r) for `count` rows, and moves all tensors of `rows` on behind each. Rows are not counted one by one, and
// not for each tensor: that takes registers, and narrow rows took up to a third more time.
template <class Visit, class... Rows>
NORMOPS_INLINE void walk(Stretches& stretches, int64_t count, Visit visit, Rows&... rows) {
  for (int r = 0; count > 0;) {
    int64_t together = stretches.left < count ? stretches.left : count;
    stretches.left -= together;
    count -= together;
#pragma GCC unroll 1
    for (; together > 0; together--, r++) {
      visit(r);
      (rows.each([](auto& tensor) { tensor.next(); }), ...);
    }
    if (stretches.left > 0) continue;
    stretches.left = stretches.size;
    (rows.each([](auto& tensor) { tensor.next_stretch(); }), ...);
  }
}

// Tiles of kRows rows: each is summed, then written. All addresses stay in registers, which matters: a load waits for
// any store that is still on its way to memory and whose address has the same low 12 bits. Those stores cover most such
// addresses, and a pointer that has to be loaded holds up all that is read through it.
template <int kRows, bool kCasts, Rest kRest, class Source, class T, class R, class Way>
[[gnu::noinline]] void process_tiles(typename Source::Rows rows, OutputRows<T, R> outputs, Stretches& stretches,
                                     int64_t tiles, int64_t cols, double eps, Way streams) {
  const auto fold = [cols, streams](const typename Source::Rows& rows, int r, int64_t begin,
                                    const char* y) NORMOPS_INLINE_LAMBDA {
    const auto squares = rows.row(r).squares();
    return fold_span<R, kRest>(begin, span_end(begin, cols),
                               [=, &rows](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
                                 if (Source::kAhead == Ahead::when_summed) rows.prefetch(column);
                                 if (Source::kFetchesOutput && kRows == 1 && !streams) prefetch(y + column * sizeof(T));
                                 return squares(column, extent, sum);
                               });
  };
  if constexpr (gives_sums<Source>()) {
    walk(
        stretches, tiles,
        [&](int) NORMOPS_INLINE_LAMBDA {
          write_row<kCasts, kRest, Source>(rows, 0, outputs, rows.rstd(eps), cols, streams);
        },
        rows, outputs);
  } else if constexpr (kRows == 1) {
    walk(
        stretches, tiles,
        [&](int) NORMOPS_INLINE_LAMBDA {
          // The first span by itself: beside a loop over all, GCC 12 spills two of AVX2's accumulators (a fifth).
          double square_sum = sum_of<R>(fold(rows, 0, 0, outputs.y.row));
          for (int64_t begin = kSpan; begin < cols; begin += kSpan) {
            square_sum += sum_of<R>(fold(rows, 0, begin, outputs.y.row));
          }
          write_row<kCasts, kRest, Source>(rows, 0, outputs, rstd_of<R>(square_sum, cols, eps), cols, streams);
        },
        rows, outputs);
  } else {
    auto summed = rows;
    Stretches to_sum = stretches;
    for (; tiles > 0; tiles--) {
      Folded<R> folded[kRows];
      compute_t<R> rstd[kRows];
      walk(to_sum, kRows, [&](int r) NORMOPS_INLINE_LAMBDA { folded[r] = fold(summed, r, 0, nullptr); }, summed);
      for (int r = 0; r < kRows; r += 4) sums_of<R>(folded + r, rstd + r);
      for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(rstd[r], cols, eps);
      walk(
          stretches, kRows,
          [&](int r)
              NORMOPS_INLINE_LAMBDA { write_row<kCasts, kRest, Source>(rows, r, outputs, rstd[r], cols, streams); },
          rows, outputs);
    }
  }
}

template <class T, class Source>
void forward_rows(const CpuArgs& args, int64_t begin, int64_t end) {
  using R = typename Source::Element;
  const int64_t cols = args.cols, bytes = cols * static_cast<int64_t>(sizeof(R));
  const bool streams = args.stream && begins_with_lines(args[kOutput]) && held_order<Source>(args).has_lines(sizeof(T));
  const bool is_tiled = !gives_sums<Source>() && bytes <= tiled_bytes(NORMOPS_VECTOR_BYTES, sizeof(R),
                                                                      Source::kCostly ? 0 : (end - begin) * bytes);
  const RowsArg scale = scale_rows<Source>(args);
  Source source(args, begin);
  RowIterator outputs(args[kOutput], begin), scales(scale, begin);
  while (begin < end) {
    Stretches stretches = common_stretches(end - begin, [&](auto visit) NORMOPS_INLINE_LAMBDA {
      source.each(visit);
      visit(outputs), visit(scales);
    });
    const bool in_tiles = is_tiled && stretches.count >= kForwardTile;
    if (in_tiles) stretches.count -= stretches.count % kForwardTile;
    const typename Source::Rows x = source.next_even(stretches.count);
    const OutputRows<T, R> y = {outputs.next_even(stretches.count), scales.next_even(stretches.count), args.casting};
    choose<sizeof(T) == 2>(casts<T>(args.casting), [&](auto casts) {
      // Rounding takes more than choosing.
      constexpr bool kCasts = std::is_same_v<decltype(casts), std::true_type>,
                     kChooses = is_compact<Source, T>() || kCasts;
      choose<!kChooses>(streams, [&](auto way) {
        choose<true>(in_tiles, [&](auto tiled) {
          constexpr int kRows = decltype(tiled)::value && !gives_sums<Source>() ? kForwardTile : 1;
          // Beyond the caches, the rest costs nothing.
          constexpr bool kFindsRest = kChooses || std::is_same_v<decltype(way), Stream>;
          choose<!kFindsRest>(cols % kStep<R> == 0, [&](auto is_whole) {
            constexpr Rest kRest = std::is_same_v<decltype(is_whole), std::true_type> ? Rest::none : Rest::looped;
            process_tiles<kRows, kCasts, kRest, Source>(x, y, stretches, stretches.count / kRows, cols, args.eps, way);
          });
        });
      });
    });
    begin += stretches.count;
  }
  if (streams) finish_stream();
}

// Rows that are summed, and where their sums are written.
template <class Source>
struct SummedTo {
  typename Source::Rows read;
  EvenRows sum;

  template <class Visit>
  void each(Visit visit) {
    read.each(visit);
    visit(sum);
  }
};

// Writes the sums of the squares of rows, as they are formed where these are normalized.
template <class Source>
void sum_rows(const CpuArgs& args, int64_t begin, int64_t end) {
  using R = typename Source::Element;
  Source source(args, begin);
  RowIterator sums(args[kSquareSum], begin);
  while (begin < end) {
    Stretches stretches =
        common_stretches(end - begin, [&](auto visit) NORMOPS_INLINE_LAMBDA { source.each(visit), visit(sums); });
    SummedTo<Source> rows = {source.next_even(stretches.count), sums.next_even(stretches.count)};
    walk(
        stretches, stretches.count,
        [&](int) NORMOPS_INLINE_LAMBDA {
          double square_sum = 0;
          for (int64_t first = 0; first < args.cols; first += kSpan) {
            square_sum +=
                sum_of<R>(fold_span<R, Rest::looped>(first, span_end(first, args.cols), rows.read.row(0).squares()));
          }
          *rows.sum.template at<compute_t<R>>() = static_cast<compute_t<R>>(square_sum);
        },
        rows);
    begin += stretches.count;
  }
}

template <class Source>
void forward_sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  const auto rows = Source(args, row).next_even(1);
  sum_spans<typename Source::Element>(args.cols, begin, end, squares, rows.row(0).squares());
}

template <class T, class Source>
void forward_columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  using R = typename Source::Element;
  const auto rows = Source(args, row).next_even(1);
  OutputRows<T, R> outputs;
  outputs.casting = args.casting;
  const RowsArg scale = scale_rows<Source>(args);
  outputs.y = RowIterator(args[kOutput], row).next_even(1);
  outputs.scale = RowIterator(scale, row).next_even(1);
  const compute_t<R> rstd = rstd_of<R>(square_sum, args.size, args.eps);
  // Whether results are rounded on the way is found out for each block: rows that threads share are few.
  written_row<sizeof(T) == 2, R, Source>(rows, 0, outputs, rstd, Cached{})
      .template write<Rest::looped>(begin, end, [](int64_t) NORMOPS_INLINE_LAMBDA {});
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
