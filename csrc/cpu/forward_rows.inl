// What the forward kernels have in common: rows that come from a Source are summed, then normalized and written.
#include "normalized_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

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

  RowIterator<const T, kNarrowGroup>& inputs() { return inputs_; }

 private:
  RowIterator<const T, kNarrowGroup> inputs_;
};

// From the rows of a Source to outputs of type T.
template <class T, class Source, class Way>
class ForwardRows {
 public:
  using Args = typename Source::Args;
  using R = typename Source::Number;
  using Row = typename Source::Row;

  // Rows written at a time, of those that are written while others are summed, where there are 32 registers and one
  // scale for all.
  static constexpr int kTurns = NORMOPS_VECTOR_BYTES == 64 && !Source::kCostly ? 2 : 1;

  // Whether rows may be written before others are read: on AVX-512, where nothing else is written.
  static constexpr bool kHasPlain = NORMOPS_VECTOR_BYTES == 64 && std::is_same_v<Source, InputRows<T>>;

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
        Folded<R> row[1];
        fold_span<R, kRest>(0, cols, row, term(r, squares_of_rows<1>(group.rows + r)));
        folded[r] = row[0];
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
      sum_group(turns[i % 2], [&](int r, auto squares)
                                  NORMOPS_INLINE_LAMBDA { return WhileWriting{normalized_row(last, r), squares}; });
      outputs_.next(y);
      if (args_.groups > 1) scales_.next(scale);  // else they are the same
    }
    const Group& last = turns[(groups - 1) % 2];
    for (int r = 0; r < kNarrowGroup; r++) normalized_row(last, r).write_columns(0, cols);
  }

  // As many of the next `rows` as are to be written before others are read, see kPlainBytes: what is written waits for
  // what is read ahead of it, where the output is not in the caches. Returns how many.
  int64_t process_plain(int64_t rows) {
    const int64_t cols = args_.cols, bytes = cols * static_cast<int64_t>(sizeof(T));
    if (cols > kPlainCols) return 0;
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
      process_steps(rows / kPlainGroup);
      return rows / kPlainGroup * kPlainGroup;
    }
    if (bytes < kPlainBytes || rows * bytes < kPlainShare) return 0;
    process_one_by_one(rows);
    return rows;
  }

  // The next `groups` groups of kRows rows, at least one: each is written while the one after it is summed, so that
  // memory is read and written all the time. Several rows share the loads of the scale.
  template <int kRows>
  [[gnu::noinline]] void process_in_turn(int64_t groups) {
    Row rows[kRows];
    compute_t<R> rstd[kRows];
    source_.next(rows);
    sum_rows<kRows>(args_.cols, args_.eps, squares_of_rows<kRows>(rows), rstd);
    for (; groups > 1; groups--) {
      const auto last = next_normalized<kRows>(rows, rstd);
      source_.next(rows);
      sum_rows<kRows>(args_.cols, args_.eps, WhileWriting{last, squares_of_rows<kRows>(rows)}, rstd);
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
  // How many of the next `rows` lie at equal distances, and so do their scales.
  int64_t even_count(int64_t rows) {
    const int64_t counts[] = {source_.inputs().even_count(), outputs_.even_count(), scales_.even_count()};
    for (int64_t count : counts) rows = count < rows ? count : rows;
    return rows;
  }

  // The next `count` rows, which lie at equal distances.
  void process_one_by_one(int64_t count) {
    const auto inputs = source_.inputs().next_even(count);
    const auto outputs = outputs_.next_even(count);
    const auto scales = scales_.next_even(count);
    args_.cols % kStep<R> == 0 ? write_one_by_one<Rest::none>(inputs, outputs, scales, count)
                               : write_one_by_one<Rest::looped>(inputs, outputs, scales, count);
  }

  // Without a rest, all addresses are in registers: a load waits for what is being written to any address with the same
  // low 12 bits, and what is on its way to memory covers most of them. A pointer that waits holds up all that is read
  // through it.
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

  // The next `groups` groups of kPlainGroup rows of a step each, which lie at equal distances, as their scales do.
  [[gnu::noinline]] void process_steps(int64_t groups) {
    const int64_t count = groups * kPlainGroup;
    auto inputs = source_.inputs().next_even(count), written = inputs;
    auto outputs = outputs_.next_even(count);
    auto scales = scales_.next_even(count);
    const double eps = args_.eps;
    for (; groups > 0; groups--) {
      Folded<R> folded[kPlainGroup];
      compute_t<R> rstd[kPlainGroup];
#pragma GCC unroll 1
      for (int r = 0; r < kPlainGroup; r++, inputs.next()) {
        folded[r] = fold_span<R, Rest::none>(0, kStep<R>, squares_of(inputs.row));
      }
      for (int r = 0; r < kPlainGroup; r += 4) sums_of<R>(folded + r, rstd + r);
      for (int r = 0; r < kPlainGroup; r++) rstd[r] = rstd_of<R>(rstd[r], kStep<R>, eps);
#pragma GCC unroll 1
      for (int r = 0; r < kPlainGroup; r++, written.next(), outputs.next(), scales.next()) {
        const Row row[1] = {{written.row}};
        normalized<1>(row, rstd + r, &outputs.row, scales.row).template write_columns<Rest::none>(0, kStep<R>);
      }
    }
  }

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

  template <int kRows>
  NORMOPS_INLINE static auto squares_of_rows(const Row* rows) {
    return [rows](int64_t column, auto extent, Block<R>(&sums)[kRows]) NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) sums[r] = rows[r].squares()(column, extent, sums[r]);
    };
  }

  // rstd of kRows rows, of whose squares the term is.
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
  RowIterator<T, kNarrowGroup> outputs_;
  const RowLayout scale_rows_;
  RowIterator<const compute_t<R>, kNarrowGroup> scales_;  // of what is written
};

template <class T, class Source, class Way>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end, Way streams) {
  using Rows = ForwardRows<T, Source, Way>;
  Rows rows(args, begin, streams);
  int64_t row = begin;
  if constexpr (Rows::kHasPlain) row += rows.process_plain(end - row);
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    const int64_t groups = (end - row) / kNarrowGroup;
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
