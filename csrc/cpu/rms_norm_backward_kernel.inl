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

// Of weights per group there are those of several: the first `sharing` rows have the first scale and partial, the next
// ones those that follow.
template <class T, class R>
struct BackwardGroup {
  int count = 0, sharing = 1;
  const compute_t<R>* scale;
  compute_t<R>* partial;  // if grad_weight is wanted
  int64_t stride;         // from a scale, or partial, to the next
  bool begins_chunk;      // whether nothing has been added to the partials yet
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
  double squares[kRowGroup] = {}, dots[kRowGroup] = {};
  Folded<R> square_folds[kRowGroup] = {}, dot_folds[kRowGroup] = {};
  for (int64_t begin = 0; begin < args.cols; begin += kSpan) {
    const auto fold = [&]<int kRows>(int r, const compute_t<R>* scale) NORMOPS_INLINE_LAMBDA {
      fold_rows<T, R, kDots, kPrefetches, kRows>(group.rows + r, scale, begin, span_end(begin, args.cols),
                                                 square_folds + r, dot_folds + r);
    };
    const compute_t<R>* scale = group.scale;
    int left = group.sharing;  // of the rows with this scale
    for (int r = 0; r < group.count;) {
      if (kSumRows > 1 && left >= kSumRows) {
        fold.template operator()<kSumRows>(r, scale);
        r += kSumRows, left -= kSumRows;
      } else {
        fold.template operator()<1>(r, scale);
        r++, left--;
      }
      if (left == 0) scale += group.stride, left = group.sharing;
    }
    add_sums(square_folds, squares);
    if (kDots) add_sums(dot_folds, dots);
  }
  group.set_sums(squares, dots, args.cols, args.eps);
}

template <class T>
compute_t<T>* partial_of(const RmsNormBackwardArgs& args, int64_t chunk, int64_t group) {
  return static_cast<compute_t<T>*>(args.grad_weight_partials) +
         (chunk * args.groups + group) * padded_cols(kDType<T>, args.cols);
}

// Those that are written at once: they share the loads of the scale, and the partial.
constexpr int kWriteRows = 2;

// What a thread's share of the rows may take, of the second-level cache, before rows are prefetched into it: what is
// written while a group is summed, and the next group while it is written.
constexpr int64_t kPrefetchBytes = int64_t{3} << 20;

// Those that a group has of rows that have weights per group: enough to share them, and few enough to stay in the
// first-level cache, where rows a multiple of 4096 bytes apart have few places.
constexpr int kSharingRows = 2;

// The rows of a tensor, up to kRowGroup at a time that are of one group: those of a group are `groups` rows apart.
template <class T>
class GroupedRows {
 public:
  GroupedRows(T* data, const RowLayout& layout, int64_t groups, int64_t row)
      : data_(data),
        layout_(layout),
        groups_(groups),
        row_(data, layout, row * groups, groups),
        group_(data, layout, 0) {}

  // The next `count` rows of all groups, of which `group` comes first.
  void next_rows(int count, int64_t group) {
    if (groups_ == 1) return;
    for (int r = 0; r < count; r++) rows_[r] = row_.next();
    group_ = RowIterator<T>(data_, layout_, group);
  }

  void next_group() {
    if (groups_ > 1) offset_ = group_.next() - data_;
  }

  // Of the current group, one after another.
  T* next(int r) { return groups_ == 1 ? row_.next() : rows_[r] + offset_; }

 private:
  T* data_;
  const RowLayout& layout_;
  int64_t groups_;
  RowIterator<T> row_, group_;
  T* rows_[kRowGroup];  // of the first group
  int64_t offset_ = 0;  // from there to the current group
};

// What part of the problem: these rows of these groups.
struct Region {
  int64_t row, rows;
  int64_t group, groups;
};

template <class T, class R, class Wants>
class BackwardRows {
 public:
  using Compute = compute_t<R>;
  using Group = BackwardGroup<T, R>;
  using Row = BackwardRow<T, R>;
  // Not on the narrow registers of old processors: it would double their kernels.
  static constexpr bool kMayPrefetch = Wants::grad_input && NORMOPS_VECTOR_BYTES > 16;

  BackwardRows(const RmsNormBackwardArgs& args, const Region& region)
      : args_(args),
        region_(region),
        prefetches_(kMayPrefetch &&
                    region.rows * region.groups * args.cols * static_cast<int64_t>(sizeof(T) + 2 * sizeof(R)) >
                        kPrefetchBytes),
        streams_(prefetches_ && args.stream && kLanes<R> * sizeof(R) == 64 &&
                 begins_with_lines(static_cast<const R*>(args.grad_input), args.grad_input_rows)),
        row_(region.row),
        group_(region.group + region.groups),
        grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, args.groups, region.row),
        inputs_(static_cast<const R*>(args.input), args.input_rows, args.groups, region.row),
        grad_residuals_(static_cast<const R*>(args.grad_residual), args.grad_residual_rows, args.groups, region.row),
        grad_inputs_(static_cast<R*>(args.grad_input), args.grad_input_rows, args.groups, region.row) {
    constexpr auto kRowBytes = static_cast<int64_t>(sizeof(T) + sizeof(R));
    const int64_t rows = kGroupBytes / (args.cols * kRowBytes);
    group_rows_ = rows < kWriteRows ? kWriteRows : rows < kRowGroup ? static_cast<int>(rows) : kRowGroup;
  }

  // The next rows, none behind the last.
  void next(Group& group) {
    const int64_t last_group = region_.group + region_.groups;
    if (group_ == last_group) next_rows();
    group.count = 0;
    if (count_ == 0) return;
    group.sharing = count_;
    group.scale = scale_of<R>(args_, group_);
    if (Wants::grad_weight) group.partial = partial_of<R>(args_, chunk_, group_);
    group.stride = padded_cols(kDType<R>, args_.cols);
    group.begins_chunk = row_ == chunk_ * args_.rows_per_chunk;
    do {
      each([](auto& rows) { rows.next_group(); });
      for (int r = 0; r < count_; r++) {
        Row& row = group.rows[group.count++];
        row.dy = grad_outputs_.next(r);
        row.x = inputs_.next(r);
        if (Wants::residual) row.residual = grad_residuals_.next(r);
        if (Wants::grad_input) row.dx = grad_inputs_.next(r);
      }
    } while (++group_ < last_group && group.count + count_ <= group_rows_);
  }

  void sum(Group& group) const {
    if (kMayPrefetch && prefetches_ && !streams_) {
      sum_group<T, R, Wants::grad_input, kMayPrefetch>(args_, group);
    } else {
      sum_group<T, R, Wants::grad_input, false>(args_, group);
    }
  }

  // grad_input[:, begin:end]; adds the rows' share of grad_weight to the partials.
  void write(const Group& group, const Group& ahead, int64_t begin, int64_t end) const {
    const Compute* scale = group.scale;
    Compute* partial = group.partial;
    for (int r = 0; r < group.count; r += group.sharing) {
      write_sharing(group, ahead, r, begin, end, scale, partial);
      scale += group.stride;
      partial += group.stride;
    }
    if (kMayPrefetch && streams_) finish_stream();
  }

 private:
  // The rows from `first` on that share the scale and the partial.
  [[gnu::noinline]] void write_sharing(const Group& group, const Group& ahead, int first, int64_t begin, int64_t end,
                                       const Compute* scale, Compute* partial) const {
    for (; begin < end; begin += kSpan) {
      const int64_t last = span_end(begin, end);
      int r = first;
      for (; r + kWriteRows <= first + group.sharing; r += kWriteRows) {
        if (kMayPrefetch && prefetches_) {
          write_rows<kWriteRows, kMayPrefetch>(group, ahead, r, begin, last, scale, partial);
        } else {
          write_rows<kWriteRows, false>(group, ahead, r, begin, last, scale, partial);
        }
      }
      for (; r < first + group.sharing; r++) write_rows<1, false>(group, ahead, r, begin, last, scale, partial);
    }
  }

  // `visit` gets the rows of each tensor that there is.
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_);
    visit(inputs_);
    if (Wants::residual) visit(grad_residuals_);
    if (Wants::grad_input) visit(grad_inputs_);
  }

  void next_rows() {
    row_ += count_;
    group_ = region_.group;
    // Groups of rows end with their chunk.
    chunk_ = row_ / args_.rows_per_chunk;
    const int64_t chunk_end = (chunk_ + 1) * args_.rows_per_chunk;
    const int64_t end = region_.row + region_.rows;
    const int64_t left = (chunk_end < end ? chunk_end : end) - row_;
    const int most = args_.groups > 1 ? kSharingRows : group_rows_;
    count_ = static_cast<int>(left < most ? left : most);
    each([&](auto& rows) { rows.next_rows(count_, group_); });
  }

  template <int kRows, bool kPrefetches>
  NORMOPS_INLINE void write_rows(const Group& group, const Group& next_group, int first, int64_t begin, int64_t end,
                                 const Compute* scale, Compute* partial) const {
    // Copies: what is stored could otherwise change them.
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
  const Region region_;
  const bool prefetches_, streams_;
  int group_rows_;  // at most so many
  int64_t row_;     // the first of the current ones, of which there are:
  int count_ = 0;
  int64_t chunk_;  // theirs
  int64_t group_;  // that comes next for them
  GroupedRows<const T> grad_outputs_;
  GroupedRows<const R> inputs_, grad_residuals_;
  GroupedRows<R> grad_inputs_;
};

template <class T>
void clear(compute_t<T>* partial, int64_t begin, int64_t end) {
  std::memset(partial + begin, 0, (padded_cols(kDType<T>, end) - begin) * sizeof(compute_t<T>));
}

template <class T, class R, class Wants>
void backward_region(const RmsNormBackwardArgs& args, const Region& region) {
  BackwardRows<T, R, Wants> rows(args, region);
  // Two, of which the one is written while the other, which comes next, is prefetched.
  BackwardGroup<T, R> groups[2];
  rows.next(groups[0]);
  for (int current = 0; groups[current].count > 0; current ^= 1) {
    BackwardGroup<T, R>&group = groups[current], &ahead = groups[current ^ 1];
    if (Wants::grad_weight && group.begins_chunk) {
      clear<R>(group.partial, 0, (group.count / group.sharing - 1) * group.stride + args.cols);
    }
    rows.next(ahead);
    rows.sum(group);
    rows.write(group, ahead, 0, args.cols);
  }
}

template <class T, class R, class Wants>
void backward_parts(const RmsNormBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t rows = args.rows / args.groups;
  while (begin < end) {
    const int64_t chunk = begin / args.groups, group = begin % args.groups;
    // Whole chunks, or some groups of one.
    int64_t chunks = group == 0 ? (end - begin) / args.groups : 0, groups = args.groups;
    if (chunks == 0) {
      chunks = 1;
      groups = (groups - group < end - begin ? groups - group : end - begin);
    }
    const int64_t first = chunk * args.rows_per_chunk, last = first + chunks * args.rows_per_chunk;
    backward_region<T, R, Wants>(args, {first, (last < rows ? last : rows) - first, group, groups});
    begin += chunks * groups;
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
  dispatch_backward(args, [&]<class T, class R, class Wants>() { backward_parts<T, R, Wants>(args, begin, end); });
}

void sums(const RmsNormBackwardArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    const R* const x = RowIterator(static_cast<const R*>(args.input), args.input_rows, row).next();
    sum_spans<R>(args.cols, begin, end, squares, squares_of(x));
    if (args.grad_input == nullptr) return;
    const T* const dy = RowIterator(static_cast<const T*>(args.grad_output), args.grad_output_rows, row).next();
    sum_spans<R>(args.cols, begin, end, dots, dots_of(dy, x, scale_of<R>(args, row % args.groups)));
  });
}

void columns(const RmsNormBackwardArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
  dispatch_backward(args, [&]<class T, class R, class Wants>() {
    BackwardRows<T, R, Wants> rows(args, {row / args.groups, 1, row % args.groups, 1});
    BackwardGroup<T, R> group;
    rows.next(group);
    group.set_sums({square_sum}, {dot}, args.cols, args.eps);
    // In spans, to find in the cache what was cleared.
    for (; begin < end; begin += kSpan) {
      const int64_t last = span_end(begin, end);
      if (Wants::grad_weight && group.begins_chunk) clear<R>(group.partial, begin, last);
      rows.write(group, group, begin, last);
    }
  });
}

void grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t groups, int64_t cols,
                 void* grad_weight, int64_t group, int64_t begin, int64_t end) {
  const int64_t stride = padded_cols(dtype, cols);
  dispatch(dtype, [&]<class T>() {
    const auto* const of_group = static_cast<const compute_t<T>*>(partials) + group * stride;
    dispatch(weight_dtype, [&]<class W>() {
      grad_weight_columns<T>(of_group, chunks, groups * stride, static_cast<W*>(grad_weight) + group * cols, begin,
                             end);
    });
  });
}

}  // namespace

extern const RmsNormBackwardKernels kRmsNormBackwardKernels;
const RmsNormBackwardKernels kRmsNormBackwardKernels = {rows, sums, columns, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
