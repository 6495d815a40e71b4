// What the forward kernels have in common, and the sums over a row that the backward shares with them.
// What a row gets depends on that row, the scale, eps and cols alone; every multiply-add is written out as fma (the
// build turns contraction off), so that no two instances of the same line round differently.

namespace normops::cpu::NORMOPS_ISA {
namespace {

NORMOPS_INLINE int64_t span_end(int64_t begin, int64_t cols) { return begin + kSpan < cols ? begin + kSpan : cols; }

// The columns of a block for each of a sum's chains.
template <class R>
constexpr int64_t kStep = kChainBlocks<R> * kLanes<R>;

// The code for what a span has beyond a multiple of kStep: in a loop, which keeps the chains in memory; unrolled, which
// keeps them in registers, and is six times the code; or none, for spans that have no rest, as most.
enum class Rest { looped, unrolled, none };

// kSums sums over the columns of a span, where term(column, whole_or_part, accumulators) adds one block to each of the
// accumulators. The chains are folded after every span: that bounds their length, and with it the rounding error,
// whatever the width.
template <class R, Rest kRest, int kSums, class Term>
NORMOPS_INLINE void fold_span(int64_t begin, int64_t end, Folded<R> (&folded)[kSums], Term term) {
  constexpr int kBlocks = kChainBlocks<R>;
  Block<R> chains[kBlocks][kSums] = {};
  int64_t column = begin;
  for (; column + kStep<R> <= end; column += kStep<R>) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) term(column + i * kLanes<R>, Whole{}, chains[i]);
  }
  if (kRest == Rest::unrolled && column < end) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; i++) {
      if (column + kLanes<R> <= end) {
        term(column, Whole{}, chains[i]);
      } else if (column < end) {
        term(column, Part{end - column}, chains[i]);
      }
      column += kLanes<R>;
    }
  } else if (kRest == Rest::looped && column < end) {
    // A copy: the chains would be in memory from the beginning. Not by memcpy, whose steps are shorter than a register.
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

// One sum, where term(column, whole_or_part, accumulator) returns what it becomes.
template <class R, Rest kRest, class Term>
NORMOPS_INLINE Folded<R> fold_span(int64_t begin, int64_t end, Term term) {
  Folded<R> folded[1];
  fold_span<R, kRest>(begin, end, folded, [&](int64_t column, auto extent, Block<R>(&sum)[1]) NORMOPS_INLINE_LAMBDA {
    sum[0] = term(column, extent, sum[0]);
  });
  return folded[0];
}

// The sums over the spans [begin, end), for threads that share a row.
template <class R, class Term>
NORMOPS_INLINE void sum_spans(int64_t cols, int64_t begin, int64_t end, double* sums, Term term) {
  for (int64_t span = begin; span < end; span++) {
    sums[span] = sum_of(fold_span<R, Rest::looped>(span * kSpan, span_end(span * kSpan, cols), term));
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

// Where the rows come from that are summed and normalized. Such a class has
//   using Number, their type;   using Args;
//   static constexpr bool kCostly, whether forming its blocks takes the time, not memory and not what chooses between
//     them: then there is less code, for more cases each;
//   a constructor of (const Args&, row), and next(Row (&rows)[kRows]), which finds the next kRows rows, of each:
//     squares()   adds the squares of a block to an accumulator, see fold_span
//     numbers()   once its squares have been summed; of these, block() is what is normalized, and finished() what is
//                 written, given the normalized block times the scale
template <class T>
class InputRows {
 public:
  using Number = T;
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

 private:
  RowIterator<const T, kNarrowGroup> inputs_;
};

// Rows with their rstd, to be written: y = h * rstd * w, finished. They share the scale.
template <class T, class R, class Numbers, int kRows, class Way>
struct NormalizedRows {
  Way streams;
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
    for (int r = 0; r < kRows; r++) store(y[r] + column, result[r], extent, streams);
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

  // Rows written at a time, of those wider than kNarrowBytes, where there are 32 registers and one scale for all.
  static constexpr int kTurns = NORMOPS_VECTOR_BYTES == 64 && !Source::kCostly ? 2 : 1;

  ForwardRows(const Args& args, int64_t row, Way streams)
      : args_(args),
        streams_(streams),
        source_(args, row),
        outputs_(static_cast<T*>(args.output), args.output_rows, row),
        scale_rows_(scale_rows(args)),
        scales_(scale_of<R>(args, 0), scale_rows_, row % args.groups) {}

  // The next `groups` groups of kNarrowGroup rows, at least one, of a span at most. Folds, roots and divisions take the
  // time there, and what is done once per row, not memory: so the places of a group's rows are found together, its sums
  // are taken together, and its roots and divisions go through the pipeline, or one vector, together. Each row is
  // written while one of the group after it is summed, so that memory is read and written all the time.
  void process_groups(int64_t groups) {
    if (Source::kCostly || args_.cols % kStep<R> != 0) return process_groups<Rest::unrolled>(groups);
    if constexpr (!Source::kCostly) {
      args_.cols == kStep<R> ? process_groups<Rest::none, kStep<R>>(groups) : process_groups<Rest::none>(groups);
    }
  }

  // kCols is the number of columns where it is known. Not inlined, nor is the other way: each has the registers for
  // itself.
  template <Rest kRest, int64_t kCols = 0>
  [[gnu::noinline]] void process_groups(int64_t groups) {
    struct Group {
      Row rows[kNarrowGroup];
      compute_t<R> rstd[kNarrowGroup];
    } turns[2];
    const int64_t cols = kCols > 0 ? kCols : args_.cols;
    T* y[kNarrowGroup];
    const compute_t<R>* scale[kNarrowGroup];
    const auto sum_group = [&](Group& group, auto term) NORMOPS_INLINE_LAMBDA {
      Folded<R> folded[kNarrowGroup];
      compute_t<R> sums[kNarrowGroup];
      source_.next(group.rows);
      for (int r = 0; r < kNarrowGroup; r++) {
        folded[r] = fold_span<R, kRest>(0, cols, term(r, group.rows[r].squares()));
      }
      for (int r = 0; r < kNarrowGroup; r += 4) sums_of<R>(folded + r, sums + r);
      for (int r = 0; r < kNarrowGroup; r++) group.rstd[r] = rstd_of<R>(sums[r], cols, args_.eps);
    };
    const auto normalized_row = [&](const Group& group, int r) NORMOPS_INLINE_LAMBDA {
      return normalized<1>(group.rows + r, group.rstd + r, y + r, scale[r]);
    };
    sum_group(turns[0], [](int, auto squares) NORMOPS_INLINE_LAMBDA { return squares; });
    outputs_.next(y);
    scales_.next(scale);
    for (int64_t i = 1; i < groups; i++) {
      const Group& last = turns[(i + 1) % 2];
      sum_group(turns[i % 2], [&](int r, auto squares) NORMOPS_INLINE_LAMBDA {
        return [squares, written = normalized_row(last, r)](int64_t column, auto extent,
                                                            const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
          Block<R> result;
          written.write(column, extent, [&]() NORMOPS_INLINE_LAMBDA { result = squares(column, extent, sum); });
          return result;
        };
      });
      outputs_.next(y);
      if (args_.groups > 1) scales_.next(scale);  // else they are the same
    }
    const Group& last = turns[(groups - 1) % 2];
    for (int r = 0; r < kNarrowGroup; r++) normalized_row(last, r).write_columns(0, cols);
  }

  // The next `groups` groups of kRows rows, at least one: each is written while the one after it is summed, so that
  // memory is read and written all the time. Several rows share the loads of the scale.
  template <int kRows>
  [[gnu::noinline]] void process_in_turn(int64_t groups) {
    Row rows[kRows];
    compute_t<R> rstd[kRows];
    source_.next(rows);
    sum_squares<kRows>(rows, rstd, [](int64_t, auto, auto sum) NORMOPS_INLINE_LAMBDA { sum(); });
    for (; groups > 1; groups--) {
      const auto last = next_normalized<kRows>(rows, rstd);
      source_.next(rows);
      sum_squares<kRows>(rows, rstd, [&](int64_t column, auto extent, auto sum) NORMOPS_INLINE_LAMBDA {
        last.write(column, extent, sum);
      });
    }
    next_normalized<kRows>(rows, rstd).write_columns(0, args_.cols);
  }

  // Columns of the next row, whose sum is known.
  void write_columns(double square_sum, int64_t begin, int64_t end) {
    Row rows[1];
    source_.next(rows);
    const compute_t<R> rstd = rstd_of<R>(square_sum, args_.cols, args_.eps);
    next_normalized<1>(rows, &rstd).write_columns(begin, end);
  }

 private:
  // The scales of the groups, one after another and over again; a single one without an end that would have to be
  // carried.
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

  // With the outputs and the scale that are next.
  template <int kRows>
  NORMOPS_INLINE auto next_normalized(const Row* rows, const compute_t<R>* rstd) {
    T* y[kRows];
    outputs_.next(y);
    return normalized<kRows>(rows, rstd, y, scales_.next());
  }

  // rstd of kRows rows; each block is summed when visit(column, whole_or_part, sum) calls sum().
  template <int kRows, class Visit>
  NORMOPS_INLINE void sum_squares(const Row* rows, compute_t<R>* rstd, Visit visit) const {
    double totals[kRows] = {};
    for (int64_t begin = 0; begin < args_.cols; begin += kSpan) {
      Folded<R> folded[kRows];
      fold_span<R, Rest::looped>(begin, span_end(begin, args_.cols), folded,
                                 [&](int64_t column, auto extent, Block<R>(&sums)[kRows]) NORMOPS_INLINE_LAMBDA {
                                   visit(column, extent, [&]() NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
                                     for (int r = 0; r < kRows; r++)
                                       sums[r] = rows[r].squares()(column, extent, sums[r]);
                                   });
                                 });
      for (int r = 0; r < kRows; r++) totals[r] += sum_of(folded[r]);
    }
    for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(totals[r], args_.cols, args_.eps);
  }

  const Args& args_;
  const Way streams_;
  Source source_;
  RowIterator<T, kNarrowGroup> outputs_;
  const RowLayout scale_rows_;
  RowIterator<const compute_t<R>, kNarrowGroup> scales_;  // of what is written
};

// Whether every row begins with a cache line.
template <class T>
bool begins_with_lines(const T* data, const RowLayout& layout) {
  bool result = reinterpret_cast<uintptr_t>(data) % 64 == 0;
  for (int d = 0; d < layout.dims; d++) result &= layout.strides[d] * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  return result;
}

template <class T, class Source, class Way>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end, Way streams) {
  using Rows = ForwardRows<T, Source, Way>;
  Rows rows(args, begin, streams);
  int64_t row = begin;
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    const int64_t groups = (end - begin) / kNarrowGroup;
    if (groups > 0) rows.process_groups(groups);
    row += groups * kNarrowGroup;
  }
  if constexpr (Rows::kTurns > 1) {
    const int64_t turns = args.groups == 1 ? (end - row) / Rows::kTurns : 0;
    if (turns > 0) rows.template process_in_turn<Rows::kTurns>(turns);
    row += turns * Rows::kTurns;
  }
  if (row < end) rows.template process_in_turn<1>(end - row);
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
  sum_spans<typename Source::Number>(args.cols, begin, end, squares, rows[0].squares());
}

template <class T, class Source>
void forward_columns(const typename Source::Args& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  ForwardRows<T, Source, Cached>(args, row, {}).write_columns(square_sum, begin, end);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
