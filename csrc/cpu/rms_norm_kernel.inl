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
template <class Compute, class Term>
NORMOPS_INLINE double sum_row(int64_t cols, Term term) {
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
    for (int i = 0; i < kChains && column < end; i++, column += kLanes<Compute>) {
      if (column + kLanes<Compute> <= end) {
        chain[i] = term(column, Whole{}, chain[i]);
      } else {
        chain[i] = term(column, Part{end - column}, chain[i]);
      }
    }
    total += sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
  }
  return total;
}

// rstd = 1 / sqrt(mean(x^2) + eps): forward and backward call this one function, so that both see the same bits.
template <class T>
NORMOPS_INLINE compute_t<T> row_rstd(const T* x, int64_t cols, double eps) {
  using Compute = compute_t<T>;
  const double sum_of_squares = sum_row<Compute>(cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
    const Block<Compute> h = load(x + column, extent);
    return fma(h, h, sum);
  });
  return static_cast<Compute>(1 / std::sqrt(sum_of_squares / static_cast<double>(cols) + eps));
}

template <class Compute, class Extent>
NORMOPS_INLINE Block<Compute> load_scale(const Compute* scale, int64_t column, Extent extent) {
  return scale == nullptr ? broadcast(Compute(1)) : load(scale + column, extent);
}

template <class T>
void forward_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  using Compute = compute_t<T>;
  const auto* scale = static_cast<const Compute*>(args.scale);
  RowIterator inputs(static_cast<const T*>(args.input), args.input_rows, begin);
  RowIterator outputs(static_cast<T*>(args.output), args.output_rows, begin);
  for (int64_t row = begin; row < end; row++) {
    const T* x = inputs.next();
    T* y = outputs.next();
    const Block<Compute> rstd = broadcast(row_rstd(x, args.cols, args.eps));
    for_each_block<Compute>(0, args.cols, [&](int64_t column, auto extent) {
      const Block<Compute> w = load_scale(scale, column, extent);
      // y = x * rstd * w
      store(y + column, load(x + column, extent) * rstd * w, extent);
    });
  }
}

// Rows that go through the second pass of the backward together: the scale and the partial of grad_weight are loaded
// once for all of them. It does not show in the results: rows enter grad_weight one after another.
constexpr int kRowGroup = 4;

template <class T>
class BackwardRows {
 public:
  using Compute = compute_t<T>;

  BackwardRows(const RmsNormBackwardArgs& args, int64_t row)
      : args_(args),
        grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, row),
        inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        grad_residuals_(static_cast<const T*>(args.grad_residual), args.grad_residual_rows, row),
        grad_inputs_(static_cast<T*>(args.grad_input), args.grad_input_rows, row) {}

  // The next kRows rows; adds their share of grad_weight to `partial`, or starts it when `fresh`.
  template <int kRows>
  void process(Compute* partial, bool fresh) {
    const auto* scale = static_cast<const Compute*>(args_.scale);
    const bool wants_input = args_.grad_input != nullptr;
    const bool has_residual = args_.grad_residual != nullptr;
    const T *dy[kRows], *x[kRows], *residual[kRows] = {};
    T* dx[kRows] = {};
    Block<Compute> rstd[kRows], minus_c[kRows] = {};
    for (int r = 0; r < kRows; r++) {
      dy[r] = grad_outputs_.next();
      x[r] = inputs_.next();
      if (has_residual) residual[r] = grad_residuals_.next();
      if (wants_input) dx[r] = grad_inputs_.next();
      const Compute row_rstd_value = row_rstd(x[r], args_.cols, args_.eps);
      rstd[r] = broadcast(row_rstd_value);
      // c = rstd^2 * mean(g * x)
      if (wants_input) {
        const double dot = sum_row<Compute>(args_.cols, [&](int64_t column, auto extent, const Block<Compute>& sum) {
          const Block<Compute> g = load(dy[r] + column, extent) * load_scale(scale, column, extent);
          return fma(g, load(x[r] + column, extent), sum);
        });
        const double rstd_squared = static_cast<double>(row_rstd_value) * row_rstd_value;
        minus_c[r] = broadcast(static_cast<Compute>(-rstd_squared * dot / static_cast<double>(args_.cols)));
      }
    }
    for_each_block<Compute>(0, args_.cols, [&](int64_t column, auto extent) {
      const Block<Compute> w = load_scale(scale, column, extent);
      Block<Compute> dw = partial == nullptr || fresh ? Block<Compute>{} : load(partial + column, extent);
      for (int r = 0; r < kRows; r++) {
        const Block<Compute> dy_block = load(dy[r] + column, extent);
        const Block<Compute> x_block = load(x[r] + column, extent);
        // dw += dy * x * rstd
        dw = fma(dy_block, x_block * rstd[r], dw);
        if (wants_input) {
          // dx = rstd * (dy * w - x * c) + residual
          const Block<Compute> t = fma(minus_c[r], x_block, dy_block * w);
          const Block<Compute> result =
              has_residual ? fma(rstd[r], t, load(residual[r] + column, extent)) : rstd[r] * t;
          store(dx[r] + column, result, extent);
        }
      }
      if (partial != nullptr) store(partial + column, dw, extent);
    });
  }

 private:
  const RmsNormBackwardArgs& args_;
  RowIterator<const T> grad_outputs_, inputs_, grad_residuals_;
  RowIterator<T> grad_inputs_;
};

template <class T>
void backward_chunks(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  using Compute = compute_t<T>;
  BackwardRows<T> rows(args, begin * args.rows_per_chunk);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    auto* partial = static_cast<Compute*>(args.grad_weight_partials);
    if (partial != nullptr) partial += chunk * args.cols;
    const int64_t first = chunk * args.rows_per_chunk;
    const int64_t last = first + args.rows_per_chunk < args.rows ? first + args.rows_per_chunk : args.rows;
    int64_t row = first;
    for (; row + kRowGroup <= last; row += kRowGroup) rows.template process<kRowGroup>(partial, row == first);
    for (; row < last; row++) rows.template process<1>(partial, row == first);
  }
}

// The weight's type may need another compute type than the input's (a float64 weight with a float32 input, or the other
// way round). Those pairs are converted number by number: they are rare, and this is one row.

template <class Compute, class W>
void scale_columns(const W* weight, double weight_offset, Compute* scale, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<Compute, compute_t<W>>) {
    const Block<Compute> offset = broadcast(static_cast<Compute>(weight_offset));
    for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
      store(scale + column, load(weight + column, extent) + offset, extent);
    });
  } else {
    for (int64_t column = begin; column < end; column++) {
      scale[column] = load_number<Compute>(weight + column) + static_cast<Compute>(weight_offset);
    }
  }
}

template <class Compute, class W>
void grad_weight_columns(const Compute* partials, int64_t chunks, int64_t cols, W* grad_weight, int64_t begin,
                         int64_t end) {
  for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
    Block<Compute> total = {};
    for (int64_t chunk = 0; chunk < chunks; chunk++) total = total + load(partials + chunk * cols + column, extent);
    if constexpr (std::is_same_v<Compute, compute_t<W>>) {
      store(grad_weight + column, total, extent);
    } else {
      Compute numbers[kLanes<Compute>];
      store(numbers, total);
      for (int64_t i = 0; i < lanes_of<Compute>(extent); i++) store_number(grad_weight + column + i, numbers[i]);
    }
  });
}

void scale(DType compute, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t begin,
           int64_t end) {
  dispatch(weight_dtype, [&]<class W>() {
    const auto* typed_weight = static_cast<const W*>(weight);
    if (compute == DType::float64) {
      scale_columns(typed_weight, weight_offset, static_cast<double*>(scale), begin, end);
    } else {
      scale_columns(typed_weight, weight_offset, static_cast<float*>(scale), begin, end);
    }
  });
}

void forward(const RmsNormArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<T>(args, begin, end); });
}

void backward(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { backward_chunks<T>(args, begin, end); });
}

void grad_weight(DType compute, DType weight_dtype, const void* partials, int64_t chunks, int64_t cols,
                 void* grad_weight, int64_t begin, int64_t end) {
  dispatch(weight_dtype, [&]<class W>() {
    auto* typed_grad = static_cast<W*>(grad_weight);
    if (compute == DType::float64) {
      grad_weight_columns(static_cast<const double*>(partials), chunks, cols, typed_grad, begin, end);
    } else {
      grad_weight_columns(static_cast<const float*>(partials), chunks, cols, typed_grad, begin, end);
    }
  });
}

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale, forward, backward, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
