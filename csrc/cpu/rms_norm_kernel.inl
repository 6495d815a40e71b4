// The kernels of rms_norm and rms_norm_backward, compiled once per instruction set by foreach_isa.h.
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
NORMOPS_INLINE void row_rstds(const T* const (&x)[kRows], int64_t cols, double eps, compute_t<T> (&rstd)[kRows]) {
  double square_sum[kRows];
  for (int r = 0; r < kRows; r++) square_sum[r] = sum_row<T>(cols, squares_of(x[r]));
  for (int r = 0; r < kRows; r++) rstd[r] = rstd_of<T>(square_sum[r], cols, eps);
}

// y = x * rstd * w, as a function of column and extent.
template <class T>
NORMOPS_INLINE auto forward_block(const RmsNormArgs& args, const T* x, compute_t<T> rstd, T* y) {
  using Compute = compute_t<T>;
  const auto* scale = static_cast<const Compute*>(args.scale);
  const Block<Compute> row_rstd = broadcast(rstd);
  return [=](int64_t column, auto extent) {
    store(y + column, load(x + column, extent) * row_rstd * load(scale + column), extent);
  };
}

template <class T>
class ForwardRows {
 public:
  using Compute = compute_t<T>;

  ForwardRows(const RmsNormArgs& args, int64_t row)
      : args_(args),
        inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        outputs_(static_cast<T*>(args.output), args.output_rows, row) {}

  // The next kRows rows, to overlap what is done once per row.
  template <int kRows>
  void process_group() {
    const T* x[kRows];
    for (int r = 0; r < kRows; r++) x[r] = inputs_.next();
    Compute rstd[kRows];
    row_rstds(x, args_.cols, args_.eps, rstd);
    for (int r = 0; r < kRows; r++) {
      for_each_block<Compute>(0, args_.cols, forward_block(args_, x[r], rstd[r], outputs_.next()));
    }
  }

  // The next `rows` rows, at least one: each is written while the one after it is summed, so that memory is read and
  // written all the time.
  void process_in_turn(int64_t rows) {
    const T* x = inputs_.next();
    double square_sum = sum_row<T>(args_.cols, squares_of(x));
    for (; rows > 1; rows--) {
      const auto write = forward_block(args_, x, rstd_of<T>(square_sum, args_.cols, args_.eps), outputs_.next());
      x = inputs_.next();
      const auto add_square = squares_of(x);
      square_sum = sum_row<T>(args_.cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
        // Loads before stores, see BackwardGroup::write.
        const Block<Compute> new_sum = add_square(column, extent, sum);
        write(column, extent);
        return new_sum;
      });
    }
    const Compute rstd = rstd_of<T>(square_sum, args_.cols, args_.eps);
    for_each_block<Compute>(0, args_.cols, forward_block(args_, x, rstd, outputs_.next()));
  }

 private:
  const RmsNormArgs& args_;
  RowIterator<const T> inputs_;
  RowIterator<T> outputs_;
};

// Rows of at most so many bytes go through the forward in groups: there the sums' folds, roots and divisions take the
// time, not memory.
constexpr int kNarrowGroup = 4;
constexpr int64_t kNarrowBytes = 2048;

template <class T>
void forward_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  ForwardRows<T> rows(args, begin);
  int64_t row = begin;
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    for (; row + kNarrowGroup <= end; row += kNarrowGroup) rows.template process_group<kNarrowGroup>();
  }
  if (row < end) rows.process_in_turn(end - row);
}

// Rows that go through the second pass of the backward together: the scale and the partial of grad_weight are loaded
// once for all of them. It does not show in the results: rows enter grad_weight one after another.
constexpr int kRowGroup = 2;

// Which of the optional inputs and outputs there are.
template <bool kGradInput, bool kGradWeight, bool kResidual>
struct Wants {
  static constexpr bool grad_input = kGradInput, grad_weight = kGradWeight, residual = kResidual;
};

template <class T, class Wants, int kRows>
struct BackwardGroup {
  using Compute = compute_t<T>;

  const Compute* scale;
  const T *dy[kRows], *x[kRows], *residual[kRows] = {};
  T* dx[kRows] = {};
  Block<Compute> rstd[kRows], minus_c[kRows] = {};

  // The terms of mean(dy * w * x) of row r.
  auto dots(int r) const {
    return [scale = scale, dy = dy[r], x = x[r]](int64_t column, auto extent, const Block<Compute>& sum) {
      const Block<Compute> g = load(dy + column, extent) * load(scale + column);
      return fma(g, load(x + column, extent), sum);
    };
  }

  // `dot` is the sum of dots(r), and not used if grad_input is not wanted.
  void set_sums(int r, Compute row_rstd, double dot, int64_t cols) {
    rstd[r] = broadcast(row_rstd);
    if (!Wants::grad_input) return;
    // c = rstd^3 * mean(dy * w * x)
    const double rstd_cubed = static_cast<double>(row_rstd) * row_rstd * row_rstd;
    minus_c[r] = broadcast(static_cast<Compute>(-rstd_cubed * (dot / static_cast<double>(cols))));
  }

  // grad_input[:, begin:end]; adds the rows' share of grad_weight to `partial`.
  void write(int64_t begin, int64_t end, Compute* partial) const {
    for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
      const Block<Compute> w = load(scale + column);
      Block<Compute> dw = Wants::grad_weight ? load(partial + column) : Block<Compute>{};
      Block<Compute> result[kRows];
      for (int r = 0; r < kRows; r++) {
        const Block<Compute> scaled_dy = load(dy[r] + column, extent) * rstd[r];
        const Block<Compute> x_block = load(x[r] + column, extent);
        // dw += dy * rstd * x
        dw = fma(scaled_dy, x_block, dw);
        // dx = dy * rstd * w - x * c + residual
        const Block<Compute> rest =
            Wants::residual ? fma(minus_c[r], x_block, load(residual[r] + column, extent)) : minus_c[r] * x_block;
        result[r] = fma(scaled_dy, w, rest);
      }
      // After the last load: rows often lie a multiple of 4096 bytes apart, and a load that follows a store with the
      // same low address bits waits for it.
      if (Wants::grad_input) {
        for (int r = 0; r < kRows; r++) store(dx[r] + column, result[r], extent);
      }
      if (Wants::grad_weight) store(partial + column, dw);
    });
  }
};

template <class T, class Wants>
class BackwardRows {
 public:
  using Compute = compute_t<T>;

  BackwardRows(const RmsNormBackwardArgs& args, int64_t row)
      : args_(args),
        grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, row),
        inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        grad_residuals_(static_cast<const T*>(args.grad_residual), args.grad_residual_rows, row),
        grad_inputs_(static_cast<T*>(args.grad_input), args.grad_input_rows, row) {}

  // The next kRows rows.
  template <int kRows>
  NORMOPS_INLINE BackwardGroup<T, Wants, kRows> next() {
    BackwardGroup<T, Wants, kRows> group;
    group.scale = static_cast<const Compute*>(args_.scale);
    for (int r = 0; r < kRows; r++) {
      group.dy[r] = grad_outputs_.next();
      group.x[r] = inputs_.next();
      if (Wants::residual) group.residual[r] = grad_residuals_.next();
      if (Wants::grad_input) group.dx[r] = grad_inputs_.next();
    }
    return group;
  }

  // The next kRows rows; adds their share of grad_weight to `partial`.
  template <int kRows>
  void process(Compute* partial) {
    const int64_t cols = args_.cols;
    BackwardGroup<T, Wants, kRows> group = next<kRows>();
    Compute rstd[kRows];
    row_rstds(group.x, cols, args_.eps, rstd);
    for (int r = 0; r < kRows; r++) {
      group.set_sums(r, rstd[r], Wants::grad_input ? sum_row<T>(cols, group.dots(r)) : 0, cols);
    }
    group.write(0, cols, partial);
  }

 private:
  const RmsNormBackwardArgs& args_;
  RowIterator<const T> grad_outputs_, inputs_, grad_residuals_;
  RowIterator<T> grad_inputs_;
};

template <class T>
compute_t<T>* partial_of(const RmsNormBackwardArgs& args, int64_t chunk) {
  if (args.grad_weight_partials == nullptr) return nullptr;
  return static_cast<compute_t<T>*>(args.grad_weight_partials) + chunk * padded_cols(args.cols);
}

template <class Compute>
void clear(Compute* partial, int64_t begin, int64_t end) {
  std::memset(partial + begin, 0, (padded_cols(end) - begin) * sizeof(Compute));
}

template <class T, class Wants>
void backward_chunks(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  BackwardRows<T, Wants> rows(args, begin * args.rows_per_chunk);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    auto* const partial = partial_of<T>(args, chunk);
    if (Wants::grad_weight) clear(partial, 0, args.cols);
    int64_t row = chunk * args.rows_per_chunk;
    const int64_t last = row + args.rows_per_chunk < args.rows ? row + args.rows_per_chunk : args.rows;
    for (; row + kRowGroup <= last; row += kRowGroup) rows.template process<kRowGroup>(partial);
    for (; row < last; row++) rows.template process<1>(partial);
  }
}

// Calls visit.template operator()<Wants>() with what the arguments want.
template <class Visit>
void dispatch_wants(const RmsNormBackwardArgs& args, Visit visit) {
  const bool grad_weight = args.grad_weight_partials != nullptr;
  if (args.grad_input == nullptr) {
    if (grad_weight) visit.template operator()<Wants<false, true, false>>();
  } else if (args.grad_residual == nullptr) {
    grad_weight ? visit.template operator()<Wants<true, true, false>>()
                : visit.template operator()<Wants<true, false, false>>();
  } else {
    grad_weight ? visit.template operator()<Wants<true, true, true>>()
                : visit.template operator()<Wants<true, false, true>>();
  }
}

template <class T, class W>
void scale_columns(const W* weight, double weight_offset, compute_t<T>* scale, int64_t begin, int64_t end) {
  using Compute = compute_t<T>;
  // Adding -0 changes nothing, adding 0 would change the sign of a weight that is -0.
  const Block<Compute> offset = broadcast(static_cast<Compute>(weight_offset == 0 ? -0.0 : weight_offset));
  for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
    store(scale + column,
          reorder<T, Compute>(canonical_nans(load_elements<Compute>(weight + column, extent) + offset)));
  });
}

template <class T, class W>
void grad_weight_columns(const compute_t<T>* partials, int64_t chunks, int64_t cols, W* grad_weight, int64_t begin,
                         int64_t end) {
  using Compute = compute_t<T>;
  for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
    Block<Compute> total = {};
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      total = total + load(partials + chunk * padded_cols(cols) + column);
    }
    store_elements(grad_weight + column, reorder<Compute, T>(total), extent);
  });
}

void scale(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t begin,
           int64_t end) {
  dispatch(dtype, [&]<class T>() {
    auto* typed_scale = static_cast<compute_t<T>*>(scale);
    dispatch(weight_dtype, [&]<class W>() {
      scale_columns<T>(static_cast<const W*>(weight), weight_offset, typed_scale, begin, end);
    });
  });
}

void forward(const RmsNormArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<T>(args, begin, end); });
}

void forward_sums(const RmsNormArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch(args.dtype, [&]<class T>() {
    const T* x = RowIterator(static_cast<const T*>(args.input), args.input_rows, row).next();
    sum_spans<T>(args.cols, begin, end, squares, squares_of(x));
  });
}

void forward_columns(const RmsNormArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() {
    const T* x = RowIterator(static_cast<const T*>(args.input), args.input_rows, row).next();
    T* y = RowIterator(static_cast<T*>(args.output), args.output_rows, row).next();
    const compute_t<T> rstd = rstd_of<T>(square_sum, args.cols, args.eps);
    for_each_block<compute_t<T>>(begin, end, forward_block(args, x, rstd, y));
  });
}

void backward(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() {
    dispatch_wants(args, [&]<class Wants>() { backward_chunks<T, Wants>(args, begin, end); });
  });
}

void backward_sums(const RmsNormBackwardArgs& args, int64_t row, int64_t begin, int64_t end, double* squares,
                   double* dots) {
  dispatch(args.dtype, [&]<class T>() {
    dispatch_wants(args, [&]<class Wants>() {
      const auto group = BackwardRows<T, Wants>(args, row).template next<1>();
      sum_spans<T>(args.cols, begin, end, squares, squares_of(group.x[0]));
      if (Wants::grad_input) sum_spans<T>(args.cols, begin, end, dots, group.dots(0));
    });
  });
}

void backward_columns(const RmsNormBackwardArgs& args, int64_t row, double square_sum, double dot, int64_t begin,
                      int64_t end) {
  dispatch(args.dtype, [&]<class T>() {
    dispatch_wants(args, [&]<class Wants>() {
      auto group = BackwardRows<T, Wants>(args, row).template next<1>();
      auto* const partial = partial_of<T>(args, row / args.rows_per_chunk);
      group.set_sums(0, rstd_of<T>(square_sum, args.cols, args.eps), dot, args.cols);
      // In spans, to find in the cache what was cleared.
      for (; begin < end; begin += kSpan) {
        const int64_t last = begin + kSpan < end ? begin + kSpan : end;
        if (Wants::grad_weight && row % args.rows_per_chunk == 0) clear(partial, begin, last);
        group.write(begin, last, partial);
      }
    });
  });
}

void grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t cols, void* grad_weight,
                 int64_t begin, int64_t end) {
  dispatch(dtype, [&]<class T>() {
    const auto* typed_partials = static_cast<const compute_t<T>*>(partials);
    dispatch(weight_dtype, [&]<class W>() {
      grad_weight_columns<T>(typed_partials, chunks, cols, static_cast<W*>(grad_weight), begin, end);
    });
  });
}

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale,    forward,       forward_sums,     forward_columns,
                                        backward, backward_sums, backward_columns, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
