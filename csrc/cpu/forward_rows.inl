// What the forward kernels have in common: rows that come from a Source are summed, then normalized and written.
#include "normalized_rows.inl"
#include "row_access.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Numbers that lie in memory and are normalized as they are. The results are written as they are, too.
template <class R>
struct GivenNumbers {
  const R* data;

  template <class Extent>
  NORMOPS_INLINE Block<R> block(int64_t column, Extent extent) const {
    return load<R>(data + column, extent);
  }
  template <class Extent>
  NORMOPS_INLINE Block<R> finished(const Block<R>& y, int64_t, Extent) const {
    return y;
  }
};

// A Source is where the rows come from that are summed and normalized. It has
//   using Element: the type in whose order blocks are held
//   using Args: RmsNormArgs, or derived from it
//   static constexpr bool kCostly: whether most time goes to forming blocks, and neither to memory nor to choosing
//     between cases at run time; then there is less code, of which each piece serves more cases
//   a constructor of (const Args&, row)
//   next(Row (&rows)[kRows]): finds the next kRows rows
// A Row has
//   squares(): a term for fold_span, which adds the squares of a block to an accumulator
//   numbers(): called when the squares have been summed; its block() is what is normalized, and its finished() makes
//     what is written, given the normalized block times the scale
// This one's rows are those of the input.
template <class T>
class InputRows {
 public:
  using Element = T;
  using Args = RmsNormArgs;
  static constexpr bool kCostly = false;

  struct Row {
    const T* x;
    auto squares() const { return squares_of(x); }
    GivenNumbers<T> numbers() const { return {x}; }
  };

  InputRows(const RmsNormArgs& args, int64_t row) : inputs_(static_cast<const T*>(args.input), args.input_rows, row) {}

  template <int kRows>
  void next(Row (&rows)[kRows]) {
    const T* x[kRows];
    inputs_.next(x);
    for (int r = 0; r < kRows; r++) rows[r] = {x[r]};
  }

  RowIterator<const T, kNarrowTile>& inputs() { return inputs_; }

 private:
  RowIterator<const T, kNarrowTile> inputs_;
};

// From the rows of a Source to outputs of type T.
template <class T, class Source, class Way>
class ForwardRows {
 public:
  using Args = typename Source::Args;
  using R = typename Source::Element;
  using Row = typename Source::Row;

  // How many rows a tile has, other than of narrow rows, if all rows have one scale: two where there are 32 registers.
  static constexpr int kOverlappedRows = NORMOPS_VECTOR_BYTES == 64 && !Source::kCostly ? 2 : 1;

  // Whether rows may be taken sequentially, see kSequentialCols: on AVX-512, where nothing but the output is written.
  static constexpr bool kHasSequential = NORMOPS_VECTOR_BYTES == 64 && std::is_same_v<Source, InputRows<T>>;

  ForwardRows(const Args& args, int64_t row, Way streams)
      : args_(args),
        streams_(streams),
        source_(args, row),
        outputs_(static_cast<T*>(args.output), args.output_rows, row),
        scale_rows_(scale_rows(args)),
        scales_(scale_of<R>(args, 0), scale_rows_, row % args.groups) {}

  // The next `count` tiles, at least one, of kNarrowTile rows of a span at most. In such narrow rows it is not memory
  // that takes the time, but what is done once per row, and folds, roots and divisions. So the addresses of a tile's
  // rows are found together, its sums are taken together, and its roots and divisions go through the pipeline, or one
  // vector, together. Each row is written while one of the next tile is summed, so that memory is read and written all
  // the time.
  void process_narrow_tiles(int64_t count) {
    if (Source::kCostly || args_.cols % kStep<R> != 0) return process_narrow_tiles<Rest::unrolled>(count);
    if constexpr (!Source::kCostly) {
      args_.cols == kStep<R> ? process_narrow_tiles<Rest::none, kStep<R>>(count)
                             : process_narrow_tiles<Rest::none>(count);
    }
  }

  // kCols is the number of columns if that is known at compile time, else 0. Not inlined, and neither are the others,
  // so that each has all registers for itself.
  template <Rest kRest, int64_t kCols = 0>
  [[gnu::noinline]] void process_narrow_tiles(int64_t count) {
    struct Tile {
      Row rows[kNarrowTile];
      compute_t<R> rstd[kNarrowTile];
    } tiles[2];
    const int64_t cols = kCols > 0 ? kCols : args_.cols;
    T* y[kNarrowTile];
    const compute_t<R>* scale[kNarrowTile];
    const auto sum_tile = [&](Tile& tile, auto term) NORMOPS_INLINE_LAMBDA {
      Folded<R> folded[kNarrowTile];
      compute_t<R> sums[kNarrowTile];
      source_.next(tile.rows);
      for (int r = 0; r < kNarrowTile; r++) {
        Folded<R> row[1];
        fold_span<R, kRest>(0, cols, row, term(r, squares_of_rows<1>(tile.rows + r)));
        folded[r] = row[0];
      }
      for (int r = 0; r < kNarrowTile; r += 4) sums_of<R>(folded + r, sums + r);
      for (int r = 0; r < kNarrowTile; r++) tile.rstd[r] = rstd_of<R>(sums[r], cols, args_.eps);
    };
    const auto normalized_row = [&](const Tile& tile, int r) NORMOPS_INLINE_LAMBDA {
      return normalized<1>(tile.rows + r, tile.rstd + r, y + r, scale[r]);
    };
    sum_tile(tiles[0], [](int, auto squares) NORMOPS_INLINE_LAMBDA { return squares; });
    outputs_.next(y);
    scales_.next(scale);
    for (int64_t i = 1; i < count; i++) {
      const Tile& last = tiles[(i + 1) % 2];
      sum_tile(tiles[i % 2], [&](int r, auto squares)
                                 NORMOPS_INLINE_LAMBDA { return WhileWriting{normalized_row(last, r), squares}; });
      outputs_.next(y);
      if (args_.groups > 1) scales_.next(scale);  // else they are the same
    }
    const Tile& last = tiles[(count - 1) % 2];
    for (int r = 0; r < kNarrowTile; r++) normalized_row(last, r).write_columns(0, cols);
  }

  // Takes those of the next `rows` sequentially for which that is faster, see kSequentialCols, and returns how many
  // these are: all, none, or as many as make whole tiles. Where the output is not in the caches, overlapped rows are
  // slower, as their stores wait for the loads ahead of them.
  int64_t try_sequential(int64_t rows) {
    const int64_t cols = args_.cols, bytes = cols * static_cast<int64_t>(sizeof(T));
    if (cols > kSequentialCols) return 0;
    if (bytes > kNarrowBytes) {
      for (int64_t left = rows; left > 0;) {
        const int64_t count = even_count(left);
        process_one_by_one(count);
        left -= count;
      }
      return rows;
    }
    if (!std::is_same_v<T, compute_t<R>> || even_count(rows) < rows) return 0;
    if (cols == kStep<R>) {
      process_steps(rows / kSequentialTile);
      return rows / kSequentialTile * kSequentialTile;
    }
    if (bytes < kSequentialBytes || rows * bytes < kSequentialShare) return 0;
    process_one_by_one(rows);
    return rows;
  }

  // The next `count` tiles of kRows rows, at least one: each is written while the next one is summed, so that memory is
  // read and written all the time. The rows of a tile share the loads of the scale.
  template <int kRows>
  [[gnu::noinline]] void process_overlapped(int64_t count) {
    Row rows[kRows];
    compute_t<R> rstd[kRows];
    source_.next(rows);
    sum_rows<kRows>(args_.cols, args_.eps, squares_of_rows<kRows>(rows), rstd);
    for (; count > 1; count--) {
      const auto last = next_normalized<kRows>(rows, rstd);
      source_.next(rows);
      sum_rows<kRows>(args_.cols, args_.eps, WhileWriting{last, squares_of_rows<kRows>(rows)}, rstd);
    }
    next_normalized<kRows>(rows, rstd).write_columns(0, args_.cols);
  }

  // Writes columns [begin, end) of the next row, whose sum is known.
  void write_columns(double square_sum, int64_t begin, int64_t end) {
    Row rows[1];
    source_.next(rows);
    const compute_t<R> rstd = rstd_of<R>(square_sum, args_.cols, args_.eps);
    next_normalized<1>(rows, &rstd).write_columns(begin, end);
  }

 private:
  // How many of the next `rows` lie at equal distances, and so do their scales.
  int64_t even_count(int64_t rows) {
    const int64_t counts[] = {source_.inputs().even_count(), outputs_.even_count(), scales_.even_count()};
    for (int64_t count : counts) rows = count < rows ? count : rows;
    return rows;
  }

  // The next `count` rows, which lie at equal distances, sequentially: tiles of one row.
  void process_one_by_one(int64_t count) {
    const auto inputs = source_.inputs().next_even(count);
    const auto outputs = outputs_.next_even(count);
    const auto scales = scales_.next_even(count);
    args_.cols % kStep<R> == 0 ? write_one_by_one<Rest::none>(inputs, outputs, scales, count)
                               : write_one_by_one<Rest::looped>(inputs, outputs, scales, count);
  }

  // Without a rest, all addresses stay in registers, which matters: a load waits for any store that is still on its way
  // to memory and whose address has the same low 12 bits. Those stores cover most such addresses, and a pointer that
  // has to be loaded holds up all that is read through it.
  template <Rest kRest>
  [[gnu::noinline]] void write_one_by_one(EvenRows<const T> inputs, EvenRows<T> outputs,
                                          EvenRows<const compute_t<R>> scales, int64_t count) const {
    const int64_t cols = args_.cols;
    const double eps = args_.eps;
    for (; count > 0; count--) {
      const Row row[1] = {{inputs.row}};
      compute_t<R> rstd[1];
      sum_rows<1, kRest>(cols, eps, squares_of_rows<1>(row), rstd);
      normalized<1>(row, rstd, &outputs.row, scales.row).template write_columns<kRest>(0, cols);
      inputs.next();
      outputs.next();
      scales.next();
    }
  }

  // The next `tiles` tiles of kSequentialTile rows, sequentially. Each row is one step of columns, and rows lie at
  // equal distances, as do their scales.
  [[gnu::noinline]] void process_steps(int64_t tiles) {
    const int64_t count = tiles * kSequentialTile;
    auto inputs = source_.inputs().next_even(count), written = inputs;
    auto outputs = outputs_.next_even(count);
    auto scales = scales_.next_even(count);
    const double eps = args_.eps;
    for (; tiles > 0; tiles--) {
      Folded<R> folded[kSequentialTile];
      compute_t<R> rstd[kSequentialTile];
#pragma GCC unroll 1
      for (int r = 0; r < kSequentialTile; r++, inputs.next()) {
        folded[r] = fold_span<R, Rest::none>(0, kStep<R>, squares_of(inputs.row));
      }
      for (int r = 0; r < kSequentialTile; r += 4) sums_of<R>(folded + r, rstd + r);
      for (int r = 0; r < kSequentialTile; r++) rstd[r] = rstd_of<R>(rstd[r], kStep<R>, eps);
#pragma GCC unroll 1
      for (int r = 0; r < kSequentialTile; r++, written.next(), outputs.next(), scales.next()) {
        const Row row[1] = {{written.row}};
        normalized<1>(row, rstd + r, &outputs.row, scales.row).template write_columns<Rest::none>(0, kStep<R>);
      }
    }
  }

  // The scales as rows of a tensor: those of the groups, one after another, over and over again. A single one is
  // repeated so often that its end is never reached.
  static RowLayout scale_rows(const Args& args) {
    if (args.groups == 1) return {1, {INT64_MAX}, {0}};
    return {1, {args.groups}, {padded_cols(kDType<R>, args.cols)}};
  }

  template <int kRows>
  NORMOPS_INLINE auto normalized(const Row* rows, const compute_t<R>* rstd, T* const* y,
                                 const compute_t<R>* scale) const {
    NormalizedRows<T, R, decltype(rows->numbers()), kRows, Way> result;
    result.streams = streams_;
    result.scale = scale;
    for (int r = 0; r < kRows; r++) {
      result.h[r] = rows[r].numbers();
      result.y[r] = y[r];
      result.rstd[r] = broadcast<R>(rstd[r]);
    }
    return result;
  }

  // The same, to be written to the next outputs, with the next scale.
  template <int kRows>
  NORMOPS_INLINE auto next_normalized(const Row* rows, const compute_t<R>* rstd) {
    T* y[kRows];
    outputs_.next(y);
    return normalized<kRows>(rows, rstd, y, scales_.next());
  }

  template <int kRows>
  NORMOPS_INLINE static auto squares_of_rows(const Row* rows) {
    return [rows](int64_t column, auto extent, Block<R>(&sums)[kRows]) NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) sums[r] = rows[r].squares()(column, extent, sums[r]);
    };
  }

  // Forms rstd of kRows rows, of which `term` adds the squares.
  template <int kRows, Rest kRest = Rest::looped, class Term>
  NORMOPS_INLINE static void sum_rows(int64_t cols, double eps, const Term& term, compute_t<R>* rstd) {
    double totals[kRows] = {};
    for (int64_t begin = 0; begin < cols; begin += kSpan) {
      Folded<R> folded[kRows];
      fold_span<R, kRest>(begin, span_end(begin, cols), folded, term);
      for (int r = 0; r < kRows; r++) totals[r] += sum_of(folded[r]);
    }
    for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(totals[r], cols, eps);
  }

  const Args& args_;
  const Way streams_;
  Source source_;
  RowIterator<T, kNarrowTile> outputs_;
  const RowLayout scale_rows_;
  RowIterator<const compute_t<R>, kNarrowTile> scales_;  // of the rows in outputs_
};

template <class T, class Source, class Way>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end, Way streams) {
  using Rows = ForwardRows<T, Source, Way>;
  Rows rows(args, begin, streams);
  int64_t row = begin;
  if constexpr (Rows::kHasSequential) row += rows.try_sequential(end - row);
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    const int64_t tiles = (end - row) / kNarrowTile;
    if (tiles > 0) rows.process_narrow_tiles(tiles);
    row += tiles * kNarrowTile;
  }
  if constexpr (Rows::kOverlappedRows > 1) {
    const int64_t tiles = args.groups == 1 ? (end - row) / Rows::kOverlappedRows : 0;
    if (tiles > 0) rows.template process_overlapped<Rows::kOverlappedRows>(tiles);
    row += tiles * Rows::kOverlappedRows;
  }
  if (row < end) rows.template process_overlapped<1>(end - row);
}

template <class T, class Source>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end) {
  const bool streams = args.stream && begins_with_lines(static_cast<const T*>(args.output), args.output_rows);
  choose<!Source::kCostly>(streams, [&](auto way) { forward_rows<T, Source>(args, begin, end, way); });
  if (streams) finish_stream();
}

template <class Source>
void forward_sums(const typename Source::Args& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  typename Source::Row rows[1];
  Source(args, row).next(rows);
  sum_spans<typename Source::Element>(args.cols, begin, end, squares, rows[0].squares());
}

template <class T, class Source>
void forward_columns(const typename Source::Args& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  ForwardRows<T, Source, Cached>(args, row, {}).write_columns(square_sum, begin, end);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
