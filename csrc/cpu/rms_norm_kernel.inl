// The kernels of rms_norm and rms_norm_backward, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Rows that go through the second pass of the backward together: the scale and the partial of grad_weight are loaded
// once for all of them. It does not show in the results: rows enter grad_weight one after another.
constexpr int kRowGroup = 2;

// Which of the optional inputs and outputs there are.
template <bool kGradInput, bool kGradWeight, bool kResidual>
struct Wants {
  static constexpr bool grad_input = kGradInput, grad_weight = kGradWeight, residual = kResidual;
};

// The terms of mean(dy * w * x).
template <class T, class R>
NORMOPS_INLINE auto dots_of(const T* dy, const R* x, const compute_t<R>* scale) {
  return [=](int64_t column, auto extent, const Block<compute_t<R>>& sum) {
    const Block<compute_t<R>> g = load_as<R>(dy + column, extent) * load(scale + column);
    return fma(g, load(x + column, extent), sum);
  };
}

// Not inlined, like row_rstds: one copy serves whatever else is wanted.
template <class T, class R, int kRows>
[[gnu::noinline]] void row_dots(const T* const (&dy)[kRows], const R* const (&x)[kRows], const compute_t<R>* scale,
                                int64_t cols, double (&dots)[kRows]) {
  for (int r = 0; r < kRows; r++) dots[r] = sum_row<R>(cols, dots_of(dy[r], x[r], scale));
}

// T is the type of grad_output, R that of everything else with rows.
template <class T, class R, class Wants, int kRows>
struct BackwardGroup {
  using Compute = compute_t<R>;

  const Compute* scale;
  const T* dy[kRows];
  const R *x[kRows], *residual[kRows] = {};
  R* dx[kRows] = {};
  Block<Compute> rstd[kRows], minus_c[kRows] = {};

  // `dot` is the sum of dots_of row r, and not used if grad_input is not wanted.
  void set_sums(int r, Compute row_rstd, double dot, int64_t cols) {
    rstd[r] = broadcast(row_rstd);
    if (!Wants::grad_input) return;
    // c = rstd^3 * mean(dy * w * x)
    const double rstd_cubed = static_cast<double>(row_rstd) * row_rstd * row_rstd;
    minus_c[r] = broadcast(static_cast<Compute>(-rstd_cubed * (dot / static_cast<double>(cols))));
  }

  // grad_input[:, begin:end]; adds the rows' share of grad_weight to `partial`.
  NORMOPS_INLINE void write(int64_t begin, int64_t end, Compute* partial) const {
    for_each_block<Compute>(begin, end, [&](int64_t column, auto extent) {
      const Block<Compute> w = load(scale + column);
      Block<Compute> dw = Wants::grad_weight ? load(partial + column) : Block<Compute>{};
      Block<Compute> result[kRows];
      for (int r = 0; r < kRows; r++) {
        const Block<Compute> scaled_dy = load_as<R>(dy[r] + column, extent) * rstd[r];
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

template <class T, class R, class Wants>
class BackwardRows {
 public:
  using Compute = compute_t<R>;

  BackwardRows(const RmsNormBackwardArgs& args, int64_t row)
      : args_(args),
        grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, row),
        inputs_(static_cast<const R*>(args.input), args.input_rows, row),
        grad_residuals_(static_cast<const R*>(args.grad_residual), args.grad_residual_rows, row),
        grad_inputs_(static_cast<R*>(args.grad_input), args.grad_input_rows, row) {}

  // The next kRows rows.
  template <int kRows>
  NORMOPS_INLINE BackwardGroup<T, R, Wants, kRows> next() {
    BackwardGroup<T, R, Wants, kRows> group;
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
    BackwardGroup<T, R, Wants, kRows> group = next<kRows>();
    Compute rstd[kRows];
    double dots[kRows] = {};
    row_rstds(group.x, cols, args_.eps, rstd);
    if (Wants::grad_input) row_dots<T, R>(group.dy, group.x, group.scale, cols, dots);
    for (int r = 0; r < kRows; r++) group.set_sums(r, rstd[r], dots[r], cols);
    group.write(0, cols, partial);
  }

 private:
  const RmsNormBackwardArgs& args_;
  RowIterator<const T> grad_outputs_;
  RowIterator<const R> inputs_, grad_residuals_;
  RowIterator<R> grad_inputs_;
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

template <class T, class R, class Wants>
void backward_chunks(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  BackwardRows<T, R, Wants> rows(args, begin * args.rows_per_chunk);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    auto* const partial = partial_of<R>(args, chunk);
    if (Wants::grad_weight) clear(partial, 0, args.cols);
    int64_t row = chunk * args.rows_per_chunk;
    const int64_t last = row + args.rows_per_chunk < args.rows ? row + args.rows_per_chunk : args.rows;
    for (; row + kRowGroup <= last; row += kRowGroup) rows.template process<kRowGroup>(partial);
    for (; row < last; row++) rows.template process<1>(partial);
  }
}

// Calls visit.template operator()<T, R, Wants>() with the types and wants of the arguments.
template <class Visit>
void dispatch_backward(const RmsNormBackwardArgs& args, Visit visit) {
  const bool grad_weight = args.grad_weight_partials != nullptr;
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    if (args.grad_input == nullptr) {
      if (grad_weight) visit.template operator()<T, R, Wants<false, true, false>>();
    } else if (args.grad_residual == nullptr) {
      grad_weight ? visit.template operator()<T, R, Wants<true, true, false>>()
                  : visit.template operator()<T, R, Wants<true, false, false>>();
    } else {
      grad_weight ? visit.template operator()<T, R, Wants<true, true, true>>()
                  : visit.template operator()<T, R, Wants<true, false, true>>();
    }
  });
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
  dispatch(args.dtype, [&]<class T>() { forward_rows<T, InputRows<T>>(args, begin, end); });
}

void sums(const RmsNormArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch(args.dtype, [&]<class T>() { forward_sums<InputRows<T>>(args, row, begin, end, squares); });
}

void columns(const RmsNormArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_columns<T, InputRows<T>>(args, row, square_sum, begin, end); });
}

void backward(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  dispatch_backward(args, [&]<class T, class R, class Wants>() { backward_chunks<T, R, Wants>(args, begin, end); });
}

void backward_sums(const RmsNormBackwardArgs& args, int64_t row, int64_t begin, int64_t end, double* squares,
                   double* dots) {
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    using Group = BackwardRows<T, R, Wants<false, false, false>>;
    const auto group = Group(args, row).template next<1>();
    sum_spans<R>(args.cols, begin, end, squares, squares_of(group.x[0]));
    if (args.grad_input != nullptr)
      sum_spans<R>(args.cols, begin, end, dots, dots_of(group.dy[0], group.x[0], group.scale));
  });
}

void backward_columns(const RmsNormBackwardArgs& args, int64_t row, double square_sum, double dot, int64_t begin,
                      int64_t end) {
  dispatch_backward(args, [&]<class T, class R, class Wants>() {
    auto group = BackwardRows<T, R, Wants>(args, row).template next<1>();
    auto* const partial = partial_of<R>(args, row / args.rows_per_chunk);
    group.set_sums(0, rstd_of<R>(square_sum, args.cols, args.eps), dot, args.cols);
    // In spans, to find in the cache what was cleared.
    for (; begin < end; begin += kSpan) {
      const int64_t last = begin + kSpan < end ? begin + kSpan : end;
      if (Wants::grad_weight && row % args.rows_per_chunk == 0) clear(partial, begin, last);
      group.write(begin, last, partial);
    }
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
const RmsNormKernels kRmsNormKernels = {scale,         {forward, sums, columns}, backward,
                                        backward_sums, backward_columns,         grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
