// What the backward kernels have in common: rows that come from a Source go through two passes, their sums, then what
// is written of them and what they add to the partials of grad_weight.
#include "grouped_rows.inl"
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Where rows come from, and where what is made of them goes. A Source stands for a norm's rows: x, which is normalized,
// and dy, the gradient of that times the scale. It has
//   using Number, the type in which blocks are held;   using Args, derived from RmsNormBackwardArgs;
//   static constexpr: kCostly, as in forward_rows.inl,
//     kGradRows, whether rows are written (else grad_weight alone is wanted),
//     kOneSum, whether both sums of a row are formed at once because the one's terms cost much that the other's share,
//     kRowBytes and kAllBytes, of a column: what is read of it, and what is read and written;
//   a constructor of (const Args&, row), and what GroupedRows has, of all its tensors: next_rows, next_group, and
//     next(r, position in its group), which returns a Row:
//       x(column, extent), and summed(column, extent): x and dy, for the first pass; what that keeps for the second
//       one,
//         a row keeps by its position
//       terms(column, extent), for the second pass: x, dy and whatever outputs() needs
//       prefetch_read(column), prefetch_written(column)
//       store(column, outputs, extent, way)
//     Of terms: rest(minus_c), what is added to dy * rstd * w, and outputs(gradient, rstd, w): what is stored, made of
//     the gradient of x;
//   static bool begins_with_lines(const Args&), whether rows may be written around the caches.

// What x and dy of a group may take, of the second-level cache, which the group's second pass should find them in:
// fewer rows than eight if they are wide. Processors with AVX-512 have 1 MiB of it and more, those without as little as
// 256 KiB.
constexpr int64_t kGroupBytes = (NORMOPS_VECTOR_BYTES == 64 ? 256 : 64) << 10;

// Of weights per group there are those of several: the first `sharing` rows have the first scale and partial, the next
// ones those that follow.
template <class Source>
struct BackwardGroup {
  using R = typename Source::Number;

  int count = 0, sharing = 1;
  const compute_t<R>* scale;
  compute_t<R>* partial;  // null if grad_weight is not wanted
  int64_t stride;         // from a scale, or partial, to the next
  bool begins_chunk;      // whether nothing has been added to the partials yet
  typename Source::Row rows[kRowGroup];
  compute_t<R> rstd[kRowGroup], minus_c[kRowGroup];

  // `dots` are the sums of dy * w * x, and not used if no rows are written.
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

// The terms of mean(x^2), and of mean(dy * w * x).
template <class Row>
NORMOPS_INLINE auto squares_of_row(const Row& row) {
  return [row](int64_t column, auto extent, const auto& sum) NORMOPS_INLINE_LAMBDA {
    const auto x = row.x(column, extent);
    return fma(x, x, sum);
  };
}

template <class Row, class Compute>
NORMOPS_INLINE auto dots_of_row(const Row& row, const Compute* scale) {
  return [row, scale]<class R>(int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
    const auto terms = row.summed(column, extent);
    return fma(terms.dy * load_held<R>(scale + column), terms.x, sum);
  };
}

// The rows of a group that are summed at once, and whether both of their sums are where that costs no more: as many
// accumulators as there are registers for.
constexpr bool kBothSums = NORMOPS_VECTOR_BYTES == 64;
template <class Source>
constexpr int kSumRows = kBothSums && !Source::kCostly ? 2 : 1;

template <class Source, int kRows, class Choice>
NORMOPS_INLINE void fold_rows(const typename Source::Row* rows, const compute_t<typename Source::Number>* scale,
                              int64_t begin, int64_t end, Choice prefetches, Folded<typename Source::Number>* squares,
                              Folded<typename Source::Number>* dots) {
  using R = typename Source::Number;
  constexpr Rest kRest = Source::kCostly ? Rest::looped : Rest::unrolled;
  if constexpr (Source::kGradRows && (kBothSums || Source::kOneSum)) {
    Folded<R> folded[2 * kRows];
    fold_span<R, kRest>(begin, end, folded,
                        [&](int64_t column, auto extent, Block<R>(&sums)[2 * kRows]) NORMOPS_INLINE_LAMBDA {
                          const Block<R> w = load_held<R>(scale + column);
#pragma GCC unroll 4
                          for (int r = 0; r < kRows; r++) {
                            if (prefetches) rows[r].prefetch_written(column);
                            const auto terms = rows[r].summed(column, extent);
                            sums[r] = fma(terms.x, terms.x, sums[r]);
                            sums[kRows + r] = fma(terms.dy * w, terms.x, sums[kRows + r]);
                          }
                        });
    for (int r = 0; r < kRows; r++) {
      squares[r] = folded[r];
      dots[r] = folded[kRows + r];
    }
  } else {
    for (int r = 0; r < kRows; r++) {
      const typename Source::Row row = rows[r];
      squares[r] = fold_span<R, kRest>(begin, end, squares_of_row(row));
      if (!Source::kGradRows) continue;
      const auto dot = dots_of_row(row, scale);
      dots[r] =
          fold_span<R, kRest>(begin, end, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
            if (prefetches) row.prefetch_written(column);
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

// Sums the rows of a group, dy * w * x only if rows are written.
template <class Source, class Choice>
[[gnu::noinline]] void sum_group(const typename Source::Args& args, BackwardGroup<Source>& group, Choice prefetches) {
  using R = typename Source::Number;
  double squares[kRowGroup] = {}, dots[kRowGroup] = {};
  Folded<R> square_folds[kRowGroup] = {}, dot_folds[kRowGroup] = {};
  for (int64_t begin = 0; begin < args.cols; begin += kSpan) {
    const auto fold = [&]<int kRows>(int r, const compute_t<R>* scale) NORMOPS_INLINE_LAMBDA {
      fold_rows<Source, kRows>(group.rows + r, scale, begin, span_end(begin, args.cols), prefetches, square_folds + r,
                               dot_folds + r);
    };
    const compute_t<R>* scale = group.scale;
    int left = group.sharing;  // of the rows with this scale
    for (int r = 0; r < group.count;) {
      if (kSumRows<Source> == 1 || left >= kSumRows<Source>) {
        fold.template operator()<kSumRows<Source>>(r, scale);
        r += kSumRows<Source>, left -= kSumRows<Source>;
      } else {
        fold.template operator()<1>(r, scale);
        r++, left--;
      }
      if (left == 0) scale += group.stride, left = group.sharing;
    }
    add_sums(square_folds, squares);
    if (Source::kGradRows) add_sums(dot_folds, dots);
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

// What part of the problem: these rows of these groups.
struct Region {
  int64_t row, rows;
  int64_t group, groups;
};

template <class Source>
class BackwardRows {
 public:
  using Args = typename Source::Args;
  using R = typename Source::Number;
  using Compute = compute_t<R>;
  using Group = BackwardGroup<Source>;
  using Row = typename Source::Row;
  // Not on the narrow registers of old processors: it would double their kernels.
  static constexpr bool kMayPrefetch = Source::kGradRows && NORMOPS_VECTOR_BYTES > 16;

  BackwardRows(const Args& args, const Region& region)
      : args_(args),
        region_(region),
        prefetches_(kMayPrefetch && region.rows * region.groups * args.cols * Source::kAllBytes > kPrefetchBytes),
        streams_(prefetches_ && args.stream && kLanes<R> * sizeof(R) == 64 && Source::begins_with_lines(args)),
        row_(region.row),
        group_(region.group + region.groups),
        source_(args, region.row) {
    const int64_t rows = kGroupBytes / (args.cols * Source::kRowBytes);
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
    group.partial = args_.grad_weight_partials != nullptr ? partial_of<R>(args_, chunk_, group_) : nullptr;
    group.stride = padded_cols(kDType<R>, args_.cols);
    group.begins_chunk = row_ == chunk_ * args_.rows_per_chunk;
    do {
      source_.next_group();
      for (int r = 0; r < count_; r++) {
        group.rows[group.count] = source_.next(r, group.count);
        group.count++;
      }
    } while (++group_ < last_group && group.count + count_ <= group_rows_);
  }

  void sum(Group& group) const {
    choose_prefetch(!streams_,
                    [&](auto prefetches) NORMOPS_INLINE_LAMBDA { sum_group<Source>(args_, group, prefetches); });
  }

  // What is written of columns [begin, end) of the rows; adds their share of grad_weight to the partials.
  void write(const Group& group, const Group& ahead, int64_t begin, int64_t end) const {
    const Compute* scale = group.scale;
    Compute* partial = group.partial;
    for (int r = 0; r < group.count; r += group.sharing) {
      if constexpr (Source::kGradRows) {
        choose<!Source::kCostly>(partial != nullptr, [&](auto wants_grad_weight) NORMOPS_INLINE_LAMBDA {
          write_sharing(group, ahead, r, begin, end, scale, partial, wants_grad_weight);
        });
      } else {
        write_sharing(group, ahead, r, begin, end, scale, partial, std::true_type{});
      }
      scale += group.stride;
      if (partial != nullptr) partial += group.stride;
    }
    if (kMayPrefetch && streams_) finish_stream();
  }

 private:
  // Calls visit with whether to prefetch, where rows are to be prefetched at all.
  template <class Visit>
  NORMOPS_INLINE void choose_prefetch(bool wanted, Visit visit) const {
    if constexpr (kMayPrefetch) {
      choose<!Source::kCostly>(prefetches_ && wanted, visit);
    } else {
      visit(std::false_type{});
    }
  }

  // The rows from `first` on that share the scale and the partial.
  template <class Choice>
  [[gnu::noinline]] void write_sharing(const Group& group, const Group& ahead, int first, int64_t begin, int64_t end,
                                       const Compute* scale, Compute* partial, Choice wants_grad_weight) const {
    for (; begin < end; begin += kSpan) {
      const int64_t last = span_end(begin, end);
      int r = first;
      for (; r + kWriteRows <= first + group.sharing; r += kWriteRows) {
        choose_prefetch(true, [&](auto prefetches) NORMOPS_INLINE_LAMBDA {
          write_rows<kWriteRows>(group, ahead, r, begin, last, scale, partial, wants_grad_weight, prefetches);
        });
      }
      for (; r < first + group.sharing; r++) {
        write_rows<1>(group, ahead, r, begin, last, scale, partial, wants_grad_weight, std::false_type{});
      }
    }
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
    source_.next_rows(count_, group_);
  }

  template <int kRows, class WantsGradWeight, class Prefetches>
  NORMOPS_INLINE void write_rows(const Group& group, const Group& next_group, int first, int64_t begin, int64_t end,
                                 const Compute* scale, Compute* partial, WantsGradWeight wants_grad_weight,
                                 Prefetches prefetches) const {
    // Copies: what is stored could otherwise change them.
    const bool streams = prefetches && streams_;
    Row rows[kRows], ahead[kRows];
    Block<R> rstd[kRows], minus_c[kRows];
    for (int r = 0; r < kRows; r++) {
      rows[r] = group.rows[first + r];
      ahead[r] = (prefetches && first + r < next_group.count ? next_group : group).rows[first + r];
      rstd[r] = broadcast<R>(group.rstd[first + r]);
      minus_c[r] = broadcast<R>(group.minus_c[first + r]);
    }
    for_each_block<R>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
      const Block<R> w = load_held<R>(scale + column);
      Block<R> dw = wants_grad_weight ? load_held<R>(partial + column) : Block<R>{};
      typename Row::Outputs outputs[kRows];
      if (prefetches) {
        for (const Row& row : ahead) row.prefetch_read(column);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const auto terms = rows[r].terms(column, extent);
        const Block<R> scaled_dy = terms.dy * rstd[r];
        // dw += dy * rstd * x
        dw = fma(scaled_dy, terms.x, dw);
        // dx = dy * rstd * w - x * c, and what the terms add
        outputs[r] = terms.outputs(fma(scaled_dy, w, terms.rest(minus_c[r])), rstd[r], w);
      }
      // After the last load: rows often lie a multiple of 4096 bytes apart, and a load that follows a store with the
      // same low address bits waits for it.
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) rows[r].store(column, outputs[r], extent, streams);
      if (wants_grad_weight) store_held<R>(partial + column, dw);
    });
  }

  const Args& args_;
  const Region region_;
  const bool prefetches_, streams_;
  int group_rows_;  // at most so many
  int64_t row_;     // the first of the current ones, of which there are:
  int count_ = 0;
  int64_t chunk_;  // theirs
  int64_t group_;  // that comes next for them
  Source source_;
};

template <class T>
void clear(compute_t<T>* partial, int64_t begin, int64_t end) {
  std::memset(partial + begin, 0, (padded_cols(kDType<T>, end) - begin) * sizeof(compute_t<T>));
}

template <class Source>
void backward_region(const typename Source::Args& args, const Region& region) {
  using R = typename Source::Number;
  BackwardRows<Source> rows(args, region);
  // Two, of which the one is written while the other, which comes next, is prefetched.
  BackwardGroup<Source> groups[2];
  rows.next(groups[0]);
  for (int current = 0; groups[current].count > 0; current ^= 1) {
    BackwardGroup<Source>&group = groups[current], &ahead = groups[current ^ 1];
    if (group.partial != nullptr && group.begins_chunk) {
      clear<R>(group.partial, 0, (group.count / group.sharing - 1) * group.stride + args.cols);
    }
    rows.next(ahead);
    rows.sum(group);
    rows.write(group, ahead, 0, args.cols);
  }
}

template <class Source>
void backward_parts(const typename Source::Args& args, int64_t begin, int64_t end) {
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
    backward_region<Source>(args, {first, (last < rows ? last : rows) - first, group, groups});
    begin += chunks * groups;
  }
}

template <class Source>
void backward_sums(const typename Source::Args& args, int64_t row, int64_t begin, int64_t end, double* squares,
                   double* dots) {
  using R = typename Source::Number;
  const int64_t group = row % args.groups;
  Source source(args, row / args.groups);
  source.next_rows(1, group);
  source.next_group();
  const typename Source::Row of_row = source.next(0, 0);
  sum_spans<R>(args.cols, begin, end, squares, squares_of_row(of_row));
  if (Source::kGradRows) {
    sum_spans<R>(args.cols, begin, end, dots, dots_of_row(of_row, scale_of<R>(args, group)));
  } else {
    for (int64_t span = begin; span < end; span++) dots[span] = 0;
  }
}

template <class Source>
void backward_columns(const typename Source::Args& args, int64_t row, double square_sum, double dot, int64_t begin,
                      int64_t end) {
  BackwardRows<Source> rows(args, {row / args.groups, 1, row % args.groups, 1});
  BackwardGroup<Source> group;
  rows.next(group);
  group.set_sums({square_sum}, {dot}, args.cols, args.eps);
  // In spans, to find in the cache what was cleared.
  for (; begin < end; begin += kSpan) {
    const int64_t last = span_end(begin, end);
    if (group.partial != nullptr && group.begins_chunk) clear<typename Source::Number>(group.partial, begin, last);
    rows.write(group, group, begin, last);
  }
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
