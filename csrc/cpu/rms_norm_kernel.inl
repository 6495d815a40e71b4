// The kernels of rms_norm and rms_norm_backward, compiled once per instruction set by foreach_isa.h.
// What a row gets depends on that row, the scale, eps and cols alone; every multiply-add is written out as fma (the
// build turns contraction off), so that no two instances of the same line round differently.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Independent chains of additions per sum: enough to hide the latency of an fma on every instruction set.
constexpr int kChains = 4;

// Columns that are summed in the chains before the chains are folded into one number. It bounds the length of a chain,
// and with it the rounding error, whatever the width.
constexpr int64_t kSpan = 1024;

// sum over columns of a term, where term(column, whole_or_part, accumulator) adds one block of it to the accumulator.
// What is done once per span or row is done in double: it costs nothing there, and the error bound stays that of one
// span.
template <class T, class Term>
NORMOPS_INLINE double sum_row(int64_t cols, Term term) {
  using Compute = compute_t<T>;
  constexpr int64_t kStep = kChains * kLanes<Compute>;
  double total = 0;
  for (int64_t begin = 0; begin < cols; begin += kSpan) {
    const int64_t end = begin + kSpan < cols ? begin + kSpan : cols;
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
    total += sum<T>((chain[0] + chain[1]) + (chain[2] + chain[3]));
  }
  return total;
}

// rstd = 1 / sqrt(mean(x^2) + eps) of each row: forward and backward call this one function, so that both see the same
// bits. The roots and divisions of several rows go through the pipeline, or one vector, together.
template <class T, int kRows>
NORMOPS_INLINE void row_rstds(const T* const (&x)[kRows], int64_t cols, double eps, compute_t<T> (&rstd)[kRows]) {
  using Compute = compute_t<T>;
  double mean[kRows];
  for (int r = 0; r < kRows; r++) {
    const T* const row = x[r];
    const double sum_of_squares = sum_row<T>(cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
      const Block<Compute> h = load(row + column, extent);
      return fma(h, h, sum);
    });
    mean[r] = sum_of_squares / static_cast<double>(cols);
  }
  for (int r = 0; r < kRows; r++) rstd[r] = static_cast<Compute>(1 / std::sqrt(mean[r] + eps));
}

template <class T>
class ForwardRows {
 public:
  using Compute = compute_t<T>;

  ForwardRows(const RmsNormArgs& args, int64_t row)
      : args_(args),
        inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        outputs_(static_cast<T*>(args.output), args.output_rows, row) {}

  // The next kRows rows.
  template <int kRows>
  void process() {
    const int64_t cols = args_.cols;
    const auto* scale = static_cast<const Compute*>(args_.scale);
    const T* x[kRows];
    for (int r = 0; r < kRows; r++) x[r] = inputs_.next();
    Compute rstd[kRows];
    row_rstds(x, cols, args_.eps, rstd);
    for (int r = 0; r < kRows; r++) {
      const T* const row = x[r];
      T* const y = outputs_.next();
      const Block<Compute> row_rstd = broadcast(rstd[r]);
      for_each_block<Compute>(0, cols, [&](int64_t column, auto extent) {
        // y = x * rstd * w
        store(y + column, load(row + column, extent) * row_rstd * load(scale + column), extent);
      });
    }
  }

 private:
  const RmsNormArgs& args_;
  RowIterator<const T> inputs_;
  RowIterator<T> outputs_;
};

// Narrow rows go through the forward in groups, to overlap what is done once per row; wider ones alone, to find the row
// in the cache in the second pass.
constexpr int kNarrowGroup = 4;
constexpr int64_t kNarrowBytes = 2048;

template <class T>
void forward_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  ForwardRows<T> rows(args, begin);
  int64_t row = begin;
  if (args.cols * static_cast<int64_t>(sizeof(T)) <= kNarrowBytes) {
    for (; row + kNarrowGroup <= end; row += kNarrowGroup) rows.template process<kNarrowGroup>();
  }
  for (; row < end; row++) rows.template process<1>();
}

// Rows that go through the second pass of the backward together: the scale and the partial of grad_weight are loaded
// once for all of them. It does not show in the results: rows enter grad_weight one after another.
constexpr int kRowGroup = 2;

// Which of the optional inputs and outputs there are.
template <bool kGradInput, bool kGradWeight, bool kResidual>
struct Wants {
  static constexpr bool grad_input = kGradInput, grad_weight = kGradWeight, residual = kResidual;
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

  // The next kRows rows; adds their share of grad_weight to `partial`.
  template <int kRows>
  void process(Compute* partial) {
    const int64_t cols = args_.cols;
    const auto* scale = static_cast<const Compute*>(args_.scale);
    const T *dy[kRows], *x[kRows], *residual[kRows] = {};
    T* dx[kRows] = {};
    for (int r = 0; r < kRows; r++) {
      dy[r] = grad_outputs_.next();
      x[r] = inputs_.next();
      if (Wants::residual) residual[r] = grad_residuals_.next();
      if (Wants::grad_input) dx[r] = grad_inputs_.next();
    }
    Compute row_rstd[kRows];
    row_rstds(x, cols, args_.eps, row_rstd);
    Block<Compute> rstd[kRows], minus_c[kRows] = {};
    for (int r = 0; r < kRows; r++) {
      rstd[r] = broadcast(row_rstd[r]);
      if (!Wants::grad_input) continue;
      // c = rstd^3 * mean(dy * w * x)
      const double dot = sum_row<T>(cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
        const Block<Compute> g = load(dy[r] + column, extent) * load(scale + column);
        return fma(g, load(x[r] + column, extent), sum);
      });
      const double rstd_cubed = static_cast<double>(row_rstd[r]) * row_rstd[r] * row_rstd[r];
      minus_c[r] = broadcast(static_cast<Compute>(-rstd_cubed * (dot / static_cast<double>(cols))));
    }
    for_each_block<Compute>(0, cols, [&](int64_t column, auto extent) {
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

 private:
  const RmsNormBackwardArgs& args_;
  RowIterator<const T> grad_outputs_, inputs_, grad_residuals_;
  RowIterator<T> grad_inputs_;
};

template <class T, class Wants>
void backward_chunks(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  using Compute = compute_t<T>;
  const int64_t stride = padded_cols(args.cols);
  BackwardRows<T, Wants> rows(args, begin * args.rows_per_chunk);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    Compute* partial = nullptr;
    if (Wants::grad_weight) {
      partial = static_cast<Compute*>(args.grad_weight_partials) + chunk * stride;
      std::memset(partial, 0, stride * sizeof(Compute));
    }
    int64_t row = chunk * args.rows_per_chunk;
    const int64_t last = row + args.rows_per_chunk < args.rows ? row + args.rows_per_chunk : args.rows;
    for (; row + kRowGroup <= last; row += kRowGroup) rows.template process<kRowGroup>(partial);
    for (; row < last; row++) rows.template process<1>(partial);
  }
}

template <class T>
void backward_wanted(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  const bool grad_weight = args.grad_weight_partials != nullptr;
  if (args.grad_input == nullptr) {
    if (grad_weight) backward_chunks<T, Wants<false, true, false>>(args, begin, end);
  } else if (args.grad_residual == nullptr) {
    grad_weight ? backward_chunks<T, Wants<true, true, false>>(args, begin, end)
                : backward_chunks<T, Wants<true, false, false>>(args, begin, end);
  } else {
    grad_weight ? backward_chunks<T, Wants<true, true, true>>(args, begin, end)
                : backward_chunks<T, Wants<true, false, true>>(args, begin, end);
  }
}

template <class T, class W>
void scale_columns(const W* weight, double weight_offset, compute_t<T>* scale, int64_t begin, int64_t end) {
  using Compute = compute_t<T>;
  // Adding -0 changes nothing, adding 0 would change the sign of a weight that is -0.
  const Block<Compute> offset = broadcast(static_cast<Compute>(weight_offset == 0 ? -0.0 : weight_offset));
  for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
    store(scale + column, reorder<T, Compute>(load_elements<Compute>(weight + column, extent) + offset));
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

void backward(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { backward_wanted<T>(args, begin, end); });
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
const RmsNormKernels kRmsNormKernels = {scale, forward, backward, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
