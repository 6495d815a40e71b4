// The kernels of rms_norm_backward, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Which of the optional inputs and outputs there are.
template <bool kGradInput, bool kGradWeight, bool kResidual>
struct Wants {
  static constexpr bool grad_input = kGradInput, grad_weight = kGradWeight, residual = kResidual;
};

// The terms of mean(dy * w * x).
template <class T, class R>
NORMOPS_INLINE auto dots_of(const T* dy, const R* x, const compute_t<R>* scale) {
  return [=](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
    const Block<R> g = load<R>(dy + column, extent) * load_held<R>(scale + column);
    return fma(g, load<R>(x + column, extent), sum);
  };
}

// T is the type of grad_output, R that of everything else with rows.
template <class T, class R>
struct BackwardRow {
  const T* dy;
  const R *x, *residual;
  R* dx;
};

// Rows of the backward that go through its two passes together. In each the scale and the partial of grad_weight stay
// in the first-level cache for a span of columns while the rows go by, and what is done once per row is done for all.
// It does not show in the results: rows enter grad_weight one after another.
constexpr int kRowGroup = 8;
// What x and dy of a group may take, of the second-level cache, which the group's second pass should find them in:
// fewer rows than eight if they are wide. Processors with AVX-512 have 1 MiB of it and more, those without as little as
// 256 KiB.
constexpr int64_t kGroupBytes = (NORMOPS_VECTOR_BYTES == 64 ? 256 : 64) << 10;

template <class T, class R>
struct BackwardGroup {
  int count = 0;
  BackwardRow<T, R> rows[kRowGroup];
  compute_t<R> rstd[kRowGroup], minus_c[kRowGroup];

  // `dots` are the sums of dots_of the rows, and not used if grad_input is not wanted.
  NORMOPS_INLINE void set_sums(const double (&squares)[kRowGroup], const double (&dots)[kRowGroup], int64_t cols,
                               double eps) {
    for (int r = 0; r < kRowGroup; r++) {
      rstd[r] = rstd_of<R>(squares[r], cols, eps);
      // c = rstd^3 * mean(dy * w * x)
      const double rstd_cubed = static_cast<double>(rstd[r]) * rstd[r] * rstd[r];
      minus_c[r] = static_cast<compute_t<R>>(-rstd_cubed * (dots[r] / static_cast<double>(cols)));
    }
  }
};

NORMOPS_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// The rows of a group that are summed at once, and whether both of their sums are: as many accumulators as there are
// registers for.
constexpr bool kBothSums = NORMOPS_VECTOR_BYTES == 64;
constexpr int kSumRows = kBothSums ? 2 : 1;

template <class T, class R, bool kDots, bool kPrefetches, int kRows>
NORMOPS_INLINE void fold_rows(const BackwardRow<T, R>* rows, const compute_t<R>* scale, int64_t begin, int64_t end,
                              Folded<R>* squares, Folded<R>* dots) {
  if constexpr (kBothSums && kDots) {
    Folded<R> folded[2 * kRows];
    fold_span<R>(begin, end, folded,
                 [&](int64_t column, auto extent, Block<R>(&sums)[2 * kRows]) NORMOPS_INLINE_LAMBDA {
                   const Block<R> w = load_held<R>(scale + column);
#pragma GCC unroll 4
                   for (int r = 0; r < kRows; r++) {
                     if (kPrefetches) prefetch(rows[r].dx + column);
                     const Block<R> x = load<R>(rows[r].x + column, extent);
                     sums[r] = fma(x, x, sums[r]);
                     sums[kRows + r] = fma(load<R>(rows[r].dy + column, extent) * w, x, sums[kRows + r]);
                   }
                 });
    for (int r = 0; r < kRows; r++) {
      squares[r] = folded[r];
      dots[r] = folded[kRows + r];
    }
  } else {
    for (int r = 0; r < kRows; r++) {
      const BackwardRow<T, R> row = rows[r];
      squares[r] = fold_span<R>(begin, end, squares_of(row.x));
      if (!kDots) continue;
      const auto dot = dots_of(row.dy, row.x, scale);
      dots[r] = fold_span<R>(begin, end, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
        if (kPrefetches) prefetch(row.dx + column);
        return dot(column, extent, sum);
      });
    }
  }
}

template <class R>
NORMOPS_INLINE void add_sums(const Folded<R> (&folded)[kRowGroup], double (&totals)[kRowGroup]) {
  compute_t<R> sums[kRowGroup];
  for (int r = 0; r < kRowGroup; r += 4) sums_of(folded + r, sums + r);
  for (int r = 0; r < kRowGroup; r++) totals[r] += sums[r];
}

// Sums the rows of a group, dy * w * x only if kDots.
template <class T, class R, bool kDots, bool kPrefetches>
[[gnu::noinline]] void sum_group(const RmsNormBackwardArgs& args, BackwardGroup<T, R>& group) {
  const auto* const scale = static_cast<const compute_t<R>*>(args.scale);
  double squares[kRowGroup] = {}, dots[kRowGroup] = {};
  Folded<R> square_folds[kRowGroup] = {}, dot_folds[kRowGroup] = {};
  for (int64_t begin = 0; begin < args.cols; begin += kSpan) {
    const auto fold = [&]<int kRows>(int r) NORMOPS_INLINE_LAMBDA {
      fold_rows<T, R, kDots, kPrefetches, kRows>(group.rows + r, scale, begin, span_end(begin, args.cols),
                                                 square_folds + r, dot_folds + r);
    };
    int r = 0;
    for (; r + kSumRows <= group.count; r += kSumRows) fold.template operator()<kSumRows>(r);
    if constexpr (kSumRows > 1) {
      for (; r < group.count; r++) fold.template operator()<1>(r);
    }
    add_sums(square_folds, squares);
    if (kDots) add_sums(dot_folds, dots);
  }
  group.set_sums(squares, dots, args.cols, args.eps);
}

// Those that are written at once: they share the loads of the scale, and the partial.
constexpr int kWriteRows = 2;

// What a thread's share of the rows may take, of the second-level cache, before rows are prefetched into it: what is
// written while a group is summed, and the next group while it is written.
constexpr int64_t kPrefetchBytes = int64_t{3} << 20;

template <class T, class R, class Wants>
class BackwardRows {
 public:
  using Compute = compute_t<R>;
  using Group = BackwardGroup<T, R>;
  using Row = BackwardRow<T, R>;
  // Not on the narrow registers of old processors: it would double their kernels.
  static constexpr bool kMayPrefetch = Wants::grad_input && NORMOPS_VECTOR_BYTES > 16;

  // Of `rows` rows from `row` on.
  BackwardRows(const RmsNormBackwardArgs& args, int64_t row, int64_t rows)
      : args_(args),
        scale_(static_cast<const Compute*>(args.scale)),
        prefetches_(kMayPrefetch &&
                    rows * args.cols * static_cast<int64_t>(sizeof(T) + 2 * sizeof(R)) > kPrefetchBytes),
        streams_(prefetches_ && args.stream && kLanes<R> * sizeof(R) == 64 &&
                 begins_with_lines(static_cast<const R*>(args.grad_input), args.grad_input_rows)),
        grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, row),
        inputs_(static_cast<const R*>(args.input), args.input_rows, row),
        grad_residuals_(static_cast<const R*>(args.grad_residual), args.grad_residual_rows, row),
        grad_inputs_(static_cast<R*>(args.grad_input), args.grad_input_rows, row) {}

  // Makes the next `count` rows the group's, at most kRowGroup.
  void next(Group& group, int64_t count) {
    group.count = static_cast<int>(count);
    for (int r = 0; r < group.count; r++) {
      Row& row = group.rows[r];
      row.dy = grad_outputs_.next();
      row.x = inputs_.next();
      if (Wants::residual) row.residual = grad_residuals_.next();
      if (Wants::grad_input) row.dx = grad_inputs_.next();
    }
  }

  void sum(Group& group) const {
    if (kMayPrefetch && prefetches_ && !streams_) {
      sum_group<T, R, Wants::grad_input, kMayPrefetch>(args_, group);
    } else {
      sum_group<T, R, Wants::grad_input, false>(args_, group);
    }
  }

  // grad_input[:, begin:end]; adds the rows' share of grad_weight to `partial`.
  [[gnu::noinline]] void write(const Group& group, const Group& ahead, int64_t begin, int64_t end,
                               Compute* partial) const {
    for (; begin < end; begin += kSpan) {
      const int64_t last = span_end(begin, end);
      int r = 0;
      for (; r + kWriteRows <= group.count; r += kWriteRows) {
        if (kMayPrefetch && prefetches_) {
          write_rows<kWriteRows, kMayPrefetch>(group, ahead, r, begin, last, partial);
        } else {
          write_rows<kWriteRows, false>(group, ahead, r, begin, last, partial);
        }
      }
      for (; r < group.count; r++) write_rows<1, false>(group, ahead, r, begin, last, partial);
    }
    if (kMayPrefetch && streams_) finish_stream();
  }

 private:
  template <int kRows, bool kPrefetches>
  NORMOPS_INLINE void write_rows(const Group& group, const Group& next_group, int first, int64_t begin, int64_t end,
                                 Compute* partial) const {
    // Copies: what is stored could otherwise change them.
    const Compute* const scale = scale_;
    const bool streams = kPrefetches && streams_;
    Row rows[kRows], ahead[kRows];
    Block<R> rstd[kRows], minus_c[kRows];
    for (int r = 0; r < kRows; r++) {
      rows[r] = group.rows[first + r];
      if (kPrefetches) ahead[r] = (first + r < next_group.count ? next_group : group).rows[first + r];
      rstd[r] = broadcast<R>(group.rstd[first + r]);
      minus_c[r] = broadcast<R>(group.minus_c[first + r]);
    }
    for_each_block<R>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      const Block<R> w = load_held<R>(scale + column);
      Block<R> dw = Wants::grad_weight ? load_held<R>(partial + column) : Block<R>{};
      Block<R> result[kRows];
      if (kPrefetches) {
        for (const Row& row : ahead) {
          prefetch(row.x + column);
          prefetch(row.dy + column);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Block<R> scaled_dy = load<R>(rows[r].dy + column, extent) * rstd[r];
        const Block<R> x = load<R>(rows[r].x + column, extent);
        // dw += dy * rstd * x
        dw = fma(scaled_dy, x, dw);
        // dx = dy * rstd * w - x * c + residual
        const Block<R> rest =
            Wants::residual ? fma(minus_c[r], x, load<R>(rows[r].residual + column, extent)) : minus_c[r] * x;
        result[r] = fma(scaled_dy, w, rest);
      }
      // After the last load: rows often lie a multiple of 4096 bytes apart, and a load that follows a store with the
      // same low address bits waits for it.
      if (Wants::grad_input && streams) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) store(rows[r].dx + column, result[r], extent, Stream{});
      } else if (Wants::grad_input) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) store(rows[r].dx + column, result[r], extent);
      }
      if (Wants::grad_weight) store_held<R>(partial + column, dw);
    });
  }

  const RmsNormBackwardArgs& args_;
  const Compute* scale_;
  const bool prefetches_, streams_;
  RowIterator<const T> grad_outputs_;
  RowIterator<const R> inputs_, grad_residuals_;
  RowIterator<R> grad_inputs_;
};

template <class T>
compute_t<T>* partial_of(const RmsNormBackwardArgs& args, int64_t chunk) {
  if (args.grad_weight_partials == nullptr) return nullptr;
  return static_cast<compute_t<T>*>(args.grad_weight_partials) + chunk * padded_cols(args.dtype, args.cols);
}

template <class T>
void clear(const RmsNormBackwardArgs& args, compute_t<T>* partial, int64_t begin, int64_t end) {
  std::memset(partial + begin, 0, (padded_cols(args.dtype, end) - begin) * sizeof(compute_t<T>));
}

template <class T, class R, class Wants>
void backward_chunks(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t last = end * args.rows_per_chunk < args.rows ? end * args.rows_per_chunk : args.rows;
  int64_t row = begin * args.rows_per_chunk;
  BackwardRows<T, R, Wants> rows(args, row, last - row);
  int64_t group_rows = kGroupBytes / (args.cols * static_cast<int64_t>(sizeof(T) + sizeof(R)));
  group_rows = group_rows < kWriteRows ? kWriteRows : group_rows < kRowGroup ? group_rows : kRowGroup;
  // Groups end with their chunk.
  const auto next = [&](BackwardGroup<T, R>& group, int64_t first) {
    const int64_t chunk_end = (first / args.rows_per_chunk + 1) * args.rows_per_chunk;
    const int64_t left = (chunk_end < last ? chunk_end : last) - first;
    rows.next(group, left < group_rows ? left : group_rows);
  };
  // Two, of which the one is written while the other, which comes next, is prefetched.
  BackwardGroup<T, R> groups[2];
  next(groups[0], row);
  for (int current = 0; row < last; current ^= 1) {
    BackwardGroup<T, R>&group = groups[current], &ahead = groups[current ^ 1];
    auto* const partial = partial_of<R>(args, row / args.rows_per_chunk);
    if (Wants::grad_weight && row % args.rows_per_chunk == 0) clear<R>(args, partial, 0, args.cols);
    row += group.count;
    next(ahead, row);
    rows.sum(group);
    rows.write(group, ahead, 0, args.cols, partial);
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
void grad_weight_columns(const compute_t<T>* partials, int64_t chunks, int64_t stride, W* grad_weight, int64_t begin,
                         int64_t end) {
  for_each_block<T>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    Block<T> total = {};
    for (int64_t chunk = 0; chunk < chunks; chunk++) total = total + load_held<T>(partials + chunk * stride + column);
    store(grad_weight + column, canonical_nans(total), extent);
  });
}

void rows(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  dispatch_backward(args, [&]<class T, class R, class Wants>() { backward_chunks<T, R, Wants>(args, begin, end); });
}

void sums(const RmsNormBackwardArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    const R* const x = RowIterator(static_cast<const R*>(args.input), args.input_rows, row).next();
    sum_spans<R>(args.cols, begin, end, squares, squares_of(x));
    if (args.grad_input == nullptr) return;
    const T* const dy = RowIterator(static_cast<const T*>(args.grad_output), args.grad_output_rows, row).next();
    sum_spans<R>(args.cols, begin, end, dots, dots_of(dy, x, static_cast<const compute_t<R>*>(args.scale)));
  });
}

void columns(const RmsNormBackwardArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
  dispatch_backward(args, [&]<class T, class R, class Wants>() {
    BackwardRows<T, R, Wants> rows(args, row, 1);
    BackwardGroup<T, R> group;
    rows.next(group, 1);
    group.set_sums({square_sum}, {dot}, args.cols, args.eps);
    auto* const partial = partial_of<R>(args, row / args.rows_per_chunk);
    // In spans, to find in the cache what was cleared.
    for (; begin < end; begin += kSpan) {
      const int64_t last = span_end(begin, end);
      if (Wants::grad_weight && row % args.rows_per_chunk == 0) clear<R>(args, partial, begin, last);
      rows.write(group, group, begin, last, partial);
    }
  });
}

void grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t cols, void* grad_weight,
                 int64_t begin, int64_t end) {
  dispatch(dtype, [&]<class T>() {
    const auto* typed_partials = static_cast<const compute_t<T>*>(partials);
    dispatch(weight_dtype, [&]<class W>() {
      grad_weight_columns<T>(typed_partials, chunks, padded_cols(dtype, cols), static_cast<W*>(grad_weight), begin,
                             end);
    });
  });
}

}  // namespace

extern const RmsNormBackwardKernels kRmsNormBackwardKernels;
const RmsNormBackwardKernels kRmsNormBackwardKernels = {rows, sums, columns, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
