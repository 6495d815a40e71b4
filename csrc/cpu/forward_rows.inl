// What the forward kernels have in common, and the sums over a row that the backward shares with them.
// What a row gets depends on that row, the scale, eps and cols alone; every multiply-add is written out as fma (the
// build turns contraction off), so that no two instances of the same line round differently.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Independent chains of additions per sum: enough to hide the latency of an fma on every instruction set.
constexpr int kChains = 4;

// The sum over the columns of a span of a term, where term(column, whole_or_part, accumulator) adds one block of it to
// the accumulator. The chains are folded after every span: that bounds their length, and with it the rounding error,
// whatever the width.
template <class T, class Term>
NORMOPS_INLINE compute_t<T> sum_span(int64_t begin, int64_t end, Term term) {
  using Compute = compute_t<T>;
  constexpr int64_t kStep = kChains * kLanes<Compute>;
  Block<Compute> chain[kChains] = {};
  int64_t column = begin;
  for (; column + kStep <= end; column += kStep) {
    for (int i = 0; i < kChains; i++) {
      chain[i] = term(column + i * kLanes<Compute>, Whole{}, chain[i]);
    }
  }
  if (column < end) {
    // Unrolled, so that the chains stay in registers.
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) {
      if (column + kLanes<Compute> <= end) {
        chain[i] = term(column, Whole{}, chain[i]);
      } else if (column < end) {
        chain[i] = term(column, Part{end - column}, chain[i]);
      }
      column += kLanes<Compute>;
    }
  }
  return sum<T>((chain[0] + chain[1]) + (chain[2] + chain[3]));
}

// The sum over all columns. What is done once per span or row is done in double: it costs nothing there, and the error
// bound stays that of one span.
template <class T, class Term>
NORMOPS_INLINE double sum_row(int64_t cols, Term term) {
  double total = 0;
  for (int64_t begin = 0; begin < cols; begin += kSpan) {
    total += sum_span<T>(begin, begin + kSpan < cols ? begin + kSpan : cols, term);
  }
  return total;
}

// The sums over the spans [begin, end), for threads that share a row.
template <class T, class Term>
NORMOPS_INLINE void sum_spans(int64_t cols, int64_t begin, int64_t end, double* sums, Term term) {
  for (int64_t span = begin; span < end; span++) {
    const int64_t first = span * kSpan;
    sums[span] = sum_span<T>(first, first + kSpan < cols ? first + kSpan : cols, term);
  }
}

// The terms of mean(x^2). Forward and backward form rstd of the same sums, so that both see the same bits.
template <class T>
NORMOPS_INLINE auto squares_of(const T* x) {
  return [x](int64_t column, auto extent, const Block<compute_t<T>>& sum) {
    const Block<compute_t<T>> h = load(x + column, extent);
    return fma(h, h, sum);
  };
}

// rstd = 1 / sqrt(mean(x^2) + eps)
template <class T>
NORMOPS_INLINE compute_t<T> rstd_of(double square_sum, int64_t cols, double eps) {
  return static_cast<compute_t<T>>(1 / std::sqrt(square_sum / static_cast<double>(cols) + eps));
}

// The same for several rows, whose roots and divisions go through the pipeline, or one vector, together.
template <class T, int kRows>
[[gnu::noinline]] void row_rstds(const T* const (&x)[kRows], int64_t cols, double eps, compute_t<T> (&rstd)[kRows]) {
  double square_sum[kRows];
  for (int r = 0; r < kRows; r++) square_sum[r] = sum_row<T>(cols, squares_of(x[r]));
  for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<T>(square_sum[r], cols, eps);
}

// Where the rows come from that are summed and normalized. Such a class has
//   using Number, their type;   using Args;
//   a constructor of (const Args&, row), and next(), which returns the next row:
//     squares()   adds the squares of a block to an accumulator, see sum_span
//     numbers()   where the row lies, once its squares have been summed
template <class T>
class InputRows {
 public:
  using Number = T;
  using Args = RmsNormArgs;

  struct Row {
    const T* x;
    auto squares() const { return squares_of(x); }
    const T* numbers() const { return x; }
  };

  InputRows(const RmsNormArgs& args, int64_t row) : inputs_(static_cast<const T*>(args.input), args.input_rows, row) {}

  Row next() { return {inputs_.next()}; }

 private:
  RowIterator<const T> inputs_;
};

// A block of y = h * rstd * w.
template <class R>
NORMOPS_INLINE auto normalized(const RmsNormArgs& args, const R* h, compute_t<R> rstd) {
  using Compute = compute_t<R>;
  const auto* scale = static_cast<const Compute*>(args.scale);
  const Block<Compute> row_rstd = broadcast(rstd);
  return [=](int64_t column, auto extent) { return load(h + column, extent) * row_rstd * load(scale + column); };
}

template <class T, class R>
NORMOPS_INLINE void write_columns(const RmsNormArgs& args, const R* h, compute_t<R> rstd, T* y, int64_t begin,
                                  int64_t end) {
  const auto result = normalized(args, h, rstd);
  for_each_block<compute_t<R>>(
      begin, end, [&](int64_t column, auto extent) { store_from<R>(y + column, result(column, extent), extent); });
}

// From the rows of a Source to outputs of type T.
template <class T, class Source>
class ForwardRows {
 public:
  using Args = typename Source::Args;
  using R = typename Source::Number;
  using Compute = compute_t<R>;

  ForwardRows(const Args& args, int64_t row)
      : args_(args), source_(args, row), outputs_(static_cast<T*>(args.output), args.output_rows, row) {}

  // The next kRows rows, to overlap what is done once per row. Not inlined, nor is the other way: each has the
  // registers for itself.
  template <int kRows>
  [[gnu::noinline]] void process_group() {
    typename Source::Row rows[kRows];
    double square_sum[kRows];
    Compute rstd[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = source_.next();
    for (int r = 0; r < kRows; r++) square_sum[r] = sum_row<R>(args_.cols, rows[r].squares());
    // Roots and divisions go through the pipeline, or one vector, together.
    for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<R>(square_sum[r], args_.cols, args_.eps);
    for (int r = 0; r < kRows; r++) {
      write_columns(args_, rows[r].numbers(), rstd[r], outputs_.next(), 0, args_.cols);
    }
  }

  // The next `rows` rows, at least one: each is written while the one after it is summed, so that memory is read and
  // written all the time.
  [[gnu::noinline]] void process_in_turn(int64_t rows) {
    auto row = source_.next();
    double square_sum = sum_row<R>(args_.cols, row.squares());
    for (; rows > 1; rows--) {
      const auto result = normalized(args_, row.numbers(), rstd_of<R>(square_sum, args_.cols, args_.eps));
      T* const y = outputs_.next();
      row = source_.next();
      const auto add_square = row.squares();
      square_sum = sum_row<R>(args_.cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
        // Loads before stores, see BackwardGroup::write.
        const Block<Compute> block = result(column, extent);
        const Block<Compute> new_sum = add_square(column, extent, sum);
        store_from<R>(y + column, block, extent);
        return new_sum;
      });
    }
    write_columns(args_, row.numbers(), rstd_of<R>(square_sum, args_.cols, args_.eps), outputs_.next(), 0, args_.cols);
  }

 private:
  const Args& args_;
  Source source_;
  RowIterator<T> outputs_;
};

// Rows of at most so many bytes go through the forward in groups: there the sums' folds, roots and divisions take the
// time, not memory.
constexpr int kNarrowGroup = 4;
constexpr int64_t kNarrowBytes = 2048;

template <class T, class Source>
void forward_rows(const typename Source::Args& args, int64_t begin, int64_t end) {
  ForwardRows<T, Source> rows(args, begin);
  int64_t row = begin;
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    for (; row + kNarrowGroup <= end; row += kNarrowGroup) rows.template process_group<kNarrowGroup>();
  }
  if (row < end) rows.process_in_turn(end - row);
}

template <class Source>
void forward_sums(const typename Source::Args& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  sum_spans<typename Source::Number>(args.cols, begin, end, squares, Source(args, row).next().squares());
}

template <class T, class Source>
void forward_columns(const typename Source::Args& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  using R = typename Source::Number;
  T* y = RowIterator(static_cast<T*>(args.output), args.output_rows, row).next();
  write_columns(args, Source(args, row).next().numbers(), rstd_of<R>(square_sum, args.cols, args.eps), y, begin, end);
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
