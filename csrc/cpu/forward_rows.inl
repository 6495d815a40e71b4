// What the forward kernels have in common, and the sums over a row that the backward shares with them.
// What a row gets depends on that row, the scale, eps and cols alone; every multiply-add is written out as fma (the
// build turns contraction off), so that no two instances of the same line round differently.

namespace normops::cpu::NORMOPS_ISA {
namespace {

NORMOPS_INLINE int64_t span_end(int64_t begin, int64_t cols) { return begin + kSpan < cols ? begin + kSpan : cols; }

// kSums sums over the columns of a span, where term(column, whole_or_part, accumulators) adds one block to each of the
// accumulators. The chains are folded after every span: that bounds their length, and with it the rounding error,
// whatever the width.
template <class R, int kSums, class Term>
NORMOPS_INLINE void fold_span(int64_t begin, int64_t end, Folded<R> (&folded)[kSums], Term term) {
  constexpr int kBlocks = kChainBlocks<R>;
  constexpr int64_t kStep = kBlocks * kLanes<R>;
  Block<R> chains[kBlocks][kSums] = {};
  int64_t column = begin;
  for (; column + kStep <= end; column += kStep) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) term(column + i * kLanes<R>, Whole{}, chains[i]);
  }
  if (column < end) {
    // Unrolled, so that the chains stay in registers.
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) {
      if (column + kLanes<R> <= end) {
        term(column, Whole{}, chains[i]);
      } else if (column < end) {
        term(column, Part{end - column}, chains[i]);
      }
      column += kLanes<R>;
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kSums; k++) {
    Block<R> chain[kBlocks];
    for (int i = 0; i < kBlocks; i++) chain[i] = chains[i][k];
    folded[k] = fold_chains<R>(chain);
  }
}

// One sum, where term(column, whole_or_part, accumulator) returns what it becomes.
template <class R, class Term>
NORMOPS_INLINE Folded<R> fold_span(int64_t begin, int64_t end, Term term) {
  Folded<R> folded[1];
  fold_span<R>(begin, end, folded, [&](int64_t column, auto extent, Block<R>(&sum)[1]) NORMOPS_INLINE_LAMBDA {
    sum[0] = term(column, extent, sum[0]);
  });
  return folded[0];
}

// The sums over the spans [begin, end), for threads that share a row.
template <class R, class Term>
NORMOPS_INLINE void sum_spans(int64_t cols, int64_t begin, int64_t end, double* sums, Term term) {
  for (int64_t span = begin; span < end; span++) {
    sums[span] = sum_of(fold_span<R>(span * kSpan, span_end(span * kSpan, cols), term));
  }
}

// The terms of mean(x^2). Forward and backward form rstd of the same sums, so that both see the same bits.
template <class R>
NORMOPS_INLINE auto squares_of(const R* x) {
  return [x](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
    const Block<R> h = load<R>(x + column, extent);
    return fma(h, h, sum);
  };
}

// rstd = 1 / sqrt(mean(x^2) + eps). What is done once per span or row is done in double: it costs nothing there, and
// the error bound stays that of one span.
template <class R>
NORMOPS_INLINE compute_t<R> rstd_of(double square_sum, int64_t cols, double eps) {
  return static_cast<compute_t<R>>(1 / std::sqrt(square_sum / static_cast<double>(cols) + eps));
}

template <class R, class Args>
NORMOPS_INLINE const compute_t<R>* scale_of(const Args& args, int64_t group) {
  return static_cast<const compute_t<R>*>(args.scale) + group * padded_cols(kDType<R>, args.cols);
}

// Numbers that lie in memory, to be normalized and written as they are.
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

// Rows that are written at a time, of those wider than kNarrowBytes, where there are 32 registers and one scale for
// all.
constexpr int kTurnRows = NORMOPS_VECTOR_BYTES == 64 ? 2 : 1;

// Where the rows come from that are summed and normalized. Such a class has
//   using Number, their type;   using Args;
//   static constexpr int kTurns, kTurnRows, or 1 if the registers are needed for the rest;
//   a constructor of (const Args&, row), and next(), which returns the next row:
//     squares()   adds the squares of a block to an accumulator, see fold_span
//     numbers()   once its squares have been summed; of these, block() is what is normalized, and finished() what is
//                 written, given the normalized block times the scale
template <class T>
class InputRows {
 public:
  using Number = T;
  using Args = RmsNormArgs;
  static constexpr int kTurns = kTurnRows;

  struct Row {
    const T* x;
    auto squares() const { return squares_of(x); }
    GivenNumbers<T> numbers() const { return {x}; }
  };

  InputRows(const RmsNormArgs& args, int64_t row) : inputs_(static_cast<const T*>(args.input), args.input_rows, row) {}

  Row next() { return {inputs_.next()}; }

 private:
  RowIterator<const T> inputs_;
};

// Rows with their rstd, to be written: y = h * rstd * w, finished. They share the scale.
template <class T, class R, class Numbers, int kRows, class Way>
struct NormalizedRows {
  const compute_t<R>* scale;
  Numbers h[kRows];
  T* y[kRows];
  Block<R> rstd[kRows];

  // A block of each. In between it calls meanwhile(), as loads come before stores, see BackwardRows::write_rows.
  template <class Extent, class Meanwhile>
  NORMOPS_INLINE void write(int64_t column, Extent extent, Meanwhile meanwhile) const {
    const Block<R> w = load_held<R>(scale + column);
    Block<R> result[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      result[r] = h[r].finished(h[r].block(column, extent) * rstd[r] * w, column, extent);
    }
    meanwhile();
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) store(y[r] + column, result[r], extent, Way{});
  }

  NORMOPS_INLINE void write_columns(int64_t begin, int64_t end) const {
    for_each_block<R>(begin, end,
                      [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA { write(column, extent, [] {}); });
  }
};

// From the rows of a Source to outputs of type T.
template <class T, class Source, class Way>
class ForwardRows {
 public:
  using Args = typename Source::Args;
  using R = typename Source::Number;
  using Row = typename Source::Row;

  ForwardRows(const Args& args, int64_t row)
      : args_(args),
        source_(args, row),
        outputs_(static_cast<T*>(args.output), args.output_rows, row),
        scale_stride_(padded_cols(kDType<R>, args.cols)),
        group_(row % args.groups),
        scale_(scale_of<R>(args, group_)) {}

  // The next `groups` groups of kNarrowGroup rows, at least one, of a span at most. Folds, roots and divisions take the
  // time there, not memory: those of a group's sums are taken together, and
  // their roots and divisions go through the pipeline, or one vector, together. Each row is written while one of the
  // group after it is summed, so that memory is read and written all the time. Not inlined, nor is the other way: each
  // has the registers for itself.
  [[gnu::noinline]] void process_groups(int64_t groups) {
    struct {
      Row rows[kNarrowGroup];
      compute_t<R> rstd[kNarrowGroup];
    } turns[2];
    for (int64_t i = 0; i < groups; i++) {
      auto &group = turns[i % 2], &last = turns[(i + 1) % 2];
      Folded<R> folded[kNarrowGroup];
      compute_t<R> sums[kNarrowGroup];
      for (int r = 0; r < kNarrowGroup; r++) {
        group.rows[r] = source_.next();
        const auto squares = group.rows[r].squares();
        if (i == 0) {
          folded[r] = fold_span<R>(0, args_.cols, squares);
          continue;
        }
        const auto written = normalized<1>(last.rows + r, last.rstd + r);
        folded[r] =
            fold_span<R>(0, args_.cols, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
              Block<R> result;
              written.write(column, extent, [&]() NORMOPS_INLINE_LAMBDA { result = squares(column, extent, sum); });
              return result;
            });
      }
      for (int r = 0; r < kNarrowGroup; r += 4) sums_of<R>(folded + r, sums + r);
      for (int r = 0; r < kNarrowGroup; r++) group.rstd[r] = rstd_of<R>(sums[r], args_.cols, args_.eps);
    }
    const auto& last = turns[(groups - 1) % 2];
    for (int r = 0; r < kNarrowGroup; r++) normalized<1>(last.rows + r, last.rstd + r).write_columns(0, args_.cols);
  }

  // The next `groups` groups of kRows rows, at least one: each is written while the one after it is summed, so that
  // memory is read and written all the time. Several rows share the loads of the scale.
  template <int kRows>
  [[gnu::noinline]] void process_in_turn(int64_t groups) {
    Row rows[kRows];
    compute_t<R> rstd[kRows];
    for (auto& row : rows) row = source_.next();
    sum_squares<kRows>(rows, rstd, [](int64_t, auto, auto sum) NORMOPS_INLINE_LAMBDA { sum(); });
    for (; groups > 1; groups--) {
      const auto last = normalized<kRows>(rows, rstd);
      for (auto& row : rows) row = source_.next();
      sum_squares<kRows>(rows, rstd, [&](int64_t column, auto extent, auto sum) NORMOPS_INLINE_LAMBDA {
        last.write(column, extent, sum);
      });
    }
    normalized<kRows>(rows, rstd).write_columns(0, args_.cols);
  }

  // Columns of the next row, whose sum is known.
  void write_columns(double square_sum, int64_t begin, int64_t end) {
    const Row row = source_.next();
    const compute_t<R> rstd = rstd_of<R>(square_sum, args_.cols, args_.eps);
    normalized<1>(&row, &rstd).write_columns(begin, end);
  }

 private:
  template <int kRows>
  NORMOPS_INLINE auto normalized(const Row* rows, const compute_t<R>* rstd) {
    NormalizedRows<T, R, decltype(rows->numbers()), kRows, Way> result;
    result.scale = scale_;
    scale_ += scale_stride_;
    if (++group_ == args_.groups) {
      group_ = 0;
      scale_ = scale_of<R>(args_, 0);
    }
    for (int r = 0; r < kRows; r++) {
      result.h[r] = rows[r].numbers();
      result.y[r] = outputs_.next();
      result.rstd[r] = broadcast<R>(rstd[r]);
    }
    return result;
  }

  // rstd of kRows rows; each block is summed when visit(column, whole_or_part, sum) calls sum().
  template <int kRows, class Visit>
  NORMOPS_INLINE void sum_squares(const Row* rows, compute_t<R>* rstd, Visit visit) const {
    double totals[kRows] = {};
    for (int64_t begin = 0; begin < args_.cols; begin += kSpan) {
      Folded<R> folded[kRows];
      fold_span<R>(begin, span_end(begin, args_.cols), folded,
                   [&](int64_t column, auto extent, Block<R>(&sums)[kRows]) NORMOPS_INLINE_LAMBDA {
                     visit(column, extent, [&]() NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
                       for (int r = 0; r < kRows; r++) sums[r] = rows[r].squares()(column, extent, sums[r]);
                     });
                   });
      for (int r = 0; r < kRows; r++) totals[r] += sum_of(folded[r]);
    }
    for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(totals[r], args_.cols, args_.eps);
  }

  const Args& args_;
  Source source_;
  RowIterator<T> outputs_;
  const int64_t scale_stride_;
  int64_t group_;              // of the next row that is written, and
  const compute_t<R>* scale_;  // its scale
};

// Whether every row begins with a cache line.
template <class T>
bool begins_with_lines(const T* data, const RowLayout& layout) {
  bool result = reinterpret_cast<uintptr_t>(data) % 64 == 0;
  for (int d = 0; d < layout.dims; d++) result &= layout.strides[d] * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  return result;
}

template <class T, class Source, class Way>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end) {
  ForwardRows<T, Source, Way> rows(args, begin);
  int64_t row = begin;
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    const int64_t groups = (end - begin) / kNarrowGroup;
    if (groups > 0) rows.process_groups(groups);
    row += groups * kNarrowGroup;
  }
  if constexpr (Source::kTurns > 1) {
    const int64_t turns = args.groups == 1 ? (end - row) / Source::kTurns : 0;
    if (turns > 0) rows.template process_in_turn<Source::kTurns>(turns);
    row += turns * Source::kTurns;
  }
  if (row < end) rows.template process_in_turn<1>(end - row);
}

template <class T, class Source>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end) {
  if (args.stream && begins_with_lines(static_cast<const T*>(args.output), args.output_rows)) {
    forward_rows<T, Source, Stream>(args, begin, end);
    finish_stream();
  } else {
    forward_rows<T, Source, Cached>(args, begin, end);
  }
}

template <class Source>
void forward_sums(const typename Source::Args& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  sum_spans<typename Source::Number>(args.cols, begin, end, squares, Source(args, row).next().squares());
}

template <class T, class Source>
void forward_columns(const typename Source::Args& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  ForwardRows<T, Source, Cached>(args, row).write_columns(square_sum, begin, end);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
