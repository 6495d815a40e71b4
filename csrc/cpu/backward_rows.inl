// What the backward kernels have in common. Rows are those of an Operator and go through two passes, a tile of them at
// a time: the first pass forms the sums over each row, the second one writes what is wanted of it and adds its share to
// the partials of grad_weight.
#include "grouped_rows.inl"
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// What an Operator has that says nothing else. It is a row: where each of its tensors has it, and what else its blocks
// are made of. It stands for a norm's row: x, which is normalized, and dy, the gradient of the normalized x times the
// scale. R is the type of the input, in whose order blocks are held, T that of grad_output, to which results are
// rounded on the way if the Casting of the arguments says so. It has
//   kTensors
//   kCostly: as in forward_rows.inl
//   kGradRows: whether rows are written; if not, grad_weight alone is wanted
//   kFormsGradient: whether dy is formed of grad_output, and not that itself
//   kSharedTerms: whether the terms of a row's two sums share what costs much, so that both sums are formed at once
//   kPlain: whether there may be a grad_residual, and sums that are given or wanted
//   kPairing: how columns of dy are formed
//   kRowBytes, kAllBytes: the bytes of a column that are read, and that are read or written
//   Shared: what all rows have in common, made of the arguments
//   a constructor of (rows, const Shared&, position), which takes each of its tensors from GroupedTensors::Next;
//     `position` is the row's place in the tile, where what the first pass computes for the second one is kept
//   x(column, extent): a block of x, for the first pass
//   summed(column, extent): the Terms of a block, for the first pass
//   terms(column, extent): the Terms of a block, for the second pass
//   paired_terms(parts, column, extent), if there are pairs: the Terms of the blocks of these parts, for either pass.
//     The other functions are called for columns without a pair.
//   prefetch_read(column), prefetch_written(column)
//   store(column, outputs, extent, way)
// Terms have dy, x and
//   outputs(gradient, rstd, w): what is stored, given that gradient
template <class R, class T>
struct BackwardOperator {
  using Element = R;
  using Gradient = T;
  using Outputs = Block<R>;
  static constexpr bool kCostly = false, kGradRows = true, kFormsGradient = false, kSharedTerms = false, kPlain = false;
  static constexpr Pairing kPairing = Pairing::none;
  static constexpr auto kRowBytes = static_cast<int64_t>(sizeof(T) + sizeof(R));
  static constexpr int64_t kAllBytes = kRowBytes + sizeof(R);

  struct Shared {
    explicit Shared(const CpuArgs&) {}
  };

  struct Terms {
    Block<R> dy, x;

    NORMOPS_INLINE Outputs outputs(const Block<R>& gradient, const Block<R>&, const Block<R>&) const {
      return gradient;
    }
  };

  const T* grad_output;
  const R* input;
  R* grad_input;  // null if not wanted

  BackwardOperator() = default;
  template <class Rows>
  explicit NORMOPS_INLINE BackwardOperator(const Rows& rows)
      : grad_output(rows.template row<kGradOutput, const T>()),
        input(rows.template row<kInput, const R>()),
        grad_input(rows.template row<kGradInput, R>()) {}

  template <class Extent>
  NORMOPS_INLINE Block<R> x(int64_t column, Extent extent) const {
    return load<R>(input + column, extent);
  }
  template <class Extent>
  NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
    return {load<R>(grad_output + column, extent), x(column, extent)};
  }
  template <class Extent>
  NORMOPS_INLINE Terms summed(int64_t column, Extent extent) const {
    return terms(column, extent);
  }
  NORMOPS_INLINE void prefetch_read(int64_t column) const {
    prefetch(input + column);
    prefetch(grad_output + column);
  }
  NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(grad_input + column); }
  template <class Extent, class Way>
  NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, Way way) const {
    if (grad_input != nullptr) NORMOPS_ISA::store(grad_input + column, gradient, extent, way);
  }
};

// Whether sums over rows are all that is wanted.
template <class Operator>
bool wants_sums(const CpuArgs& args) {
  return Operator::kPlain && args.sums == Sums::wanted;
}

constexpr BackwardConfig kConfig = backward_config(NORMOPS_VECTOR_BYTES);

// Where the sums over a row are, if they are given or wanted.
template <class Number>
struct SumsOfRow {
  static constexpr TensorIndex kTensors[] = {kSquareSum, kDot};
  Number *square_sum, *dot;

  SumsOfRow() = default;
  template <class Rows>
  explicit NORMOPS_INLINE SumsOfRow(const Rows& rows)
      : square_sum(rows.template row<kSquareSum, Number>()), dot(rows.template row<kDot, Number>()) {}
};

// Rows that go through the two passes together. Where the weight has several groups, a tile may hold rows of some that
// follow one another: `rows_per_group` rows of the first one, then as many of the next one, and so on.
template <class Operator>
struct BackwardTile {
  using R = typename Operator::Element;

  int count = 0, rows_per_group = 1;
  const compute_t<R>* scale;  // of the first group
  compute_t<R>* partial;      // of the first group, or null if grad_weight is not wanted
  int64_t stride;             // from a group's scale, or partial, to the next one's
  bool begins_chunk;          // whether nothing has been added to the partials yet
  Operator rows[kBackwardTile];
  compute_t<R> rstd[kBackwardTile], minus_c[kBackwardTile];
  SumsOfRow<compute_t<R>> sums[kBackwardTile];

  // Of the sums of x^2 and of dy * w * x; the latter matter only if rows are written.
  NORMOPS_INLINE void set_sums(const double (&squares)[kBackwardTile], const double (&dots)[kBackwardTile],
                               int64_t cols, double eps) {
    compute_t<R> square_sum[kBackwardTile], dot[kBackwardTile];
    for (int first = 0; first < count; first += 4) {
      for (int r = first; r < first + 4; r++) {
        square_sum[r] = static_cast<compute_t<R>>(squares[r]);
        dot[r] = static_cast<compute_t<R>>(dots[r]);
      }
      // Otherwise GCC 12, where it has a vector of them, goes on with the doubles that these were rounded from.
      asm("" : "+m"(square_sum), "+m"(dot));
      for (int r = first; r < first + 4; r++) rstd[r] = rstd_of<R>(square_sum[r], cols, eps);
      asm("" : "+m"(rstd));
      for (int r = first; r < first + 4; r++) {
        // c = rstd^3 * mean(dy * w * x)
        const double rstd_cubed = static_cast<double>(rstd[r]) * rstd[r] * rstd[r];
        const double mean = static_cast<double>(dot[r]) / static_cast<double>(cols);
        minus_c[r] = static_cast<compute_t<R>>(-rstd_cubed * mean);
      }
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

// Where results are rounded, as far as a choice made for it leaves that open.
template <class Casts>
NORMOPS_INLINE Casting casting_of(Casts, Casting casting) {
  return std::is_same_v<Casts, std::false_type> ? Casting{} : casting;
}

// Rounded to the type of the gradient, if that is asked for.
template <class Operator, class R>
NORMOPS_INLINE Block<R> cast(const Block<R>& block, bool is_wanted) {
  if constexpr (sizeof(typename Operator::Gradient) == 2) {
    if (is_wanted) return rounded<typename Operator::Gradient>(block);
  }
  return block;
}

// The dy of Terms, which is a result itself where the operator forms it.
template <class Operator, class Terms>
NORMOPS_INLINE auto gradient_of(const Terms& terms, Casting casting) {
  return cast<Operator>(terms.dy, Operator::kFormsGradient && casting.multiplied);
}

// dy * w
template <class Operator, class Terms, class R>
NORMOPS_INLINE Block<R> weighted(const Terms& terms, const Block<R>& w, Casting casting) {
  return cast<Operator>(gradient_of<Operator>(terms, casting) * w, casting.normalized);
}

template <class Operator, class Row, class Compute>
NORMOPS_INLINE auto dots_of_row(const Row& row, const Compute* scale, Casting casting) {
  return [row, scale, casting]<class R>(int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
    const auto terms = row.summed(column, extent);
    return fma(weighted<Operator>(terms, load_held<R>(scale + column), casting), terms.x, sum);
  };
}

// The Terms of blocks that are formed together, for the second pass.
template <class Terms>
struct TermsOfOne {
  Terms part[1];
};

template <class Row, class Extent>
NORMOPS_INLINE auto terms_of(const Row& row, const OnePart&, int64_t column, Extent extent) {
  // Not by way of a variable: GCC 12 copies it through the stack, in steps that are shorter than a register.
  return TermsOfOne<decltype(row.terms(column, extent))>{{row.terms(column, extent)}};
}

template <class Row, class Parts, class Extent>
NORMOPS_INLINE auto terms_of(const Row& row, const Parts& parts, int64_t column, Extent extent) {
  return row.paired_terms(parts, column, extent);
}

// The sum of dy * w * x over a span of a row, of whose columns some are in pairs: each stretch has its own spans, those
// of two parts half as long, so that no chain is longer than in a row without pairs.
template <class Operator, Rest kRest, class Row>
NORMOPS_INLINE auto fold_paired_dots(const Row& row, const PairedColumns& paired,
                                     const compute_t<typename Operator::Element>* scale, int64_t span, int64_t cols,
                                     Casting casting) {
  using R = typename Operator::Element;
  constexpr Pairing pairing = pairing_of<Operator>();
  Folded<R> folded[kStretches] = {};
  each_stretch<R, pairing>(
      paired, 0, cols, [&]<class Parts>(const Parts& parts, int64_t begin, int64_t end) NORMOPS_INLINE_LAMBDA {
        const int64_t first = begin + span / Parts::kCount, last = first + kSpan / Parts::kCount;
        if (first >= end) return;
        constexpr Rest kRestOfStretch = std::is_same_v<Parts, OnePart> ? Rest::looped : kRest;
        folded[parts.stretch] = fold_span<R, kRestOfStretch>(
            first, last < end ? last : end, [&](int64_t column, auto extent, Block<R> sum) NORMOPS_INLINE_LAMBDA {
              const auto terms = terms_of(row, parts, column, extent);
              for (int p = 0; p < Parts::kCount; p++) {
                const Block<R> w = load_held<R>(scale + parts.held(column, p));
                sum = fma(weighted<Operator>(terms.part[p], w, casting), terms.part[p].x, sum);
              }
              return sum;
            });
      });
  return folded[kBefore] + folded[kPaired] + folded[kBehind];
}

template <class Operator>
NORMOPS_INLINE void fold_row(const Operator& of_tile, const compute_t<typename Operator::Element>* scale, int64_t begin,
                             int64_t end, [[maybe_unused]] const PairedColumns& paired, [[maybe_unused]] int64_t cols,
                             [[maybe_unused]] Casting casting, bool prefetches,
                             Folded<typename Operator::Element>& squares, Folded<typename Operator::Element>& dots) {
  using R = typename Operator::Element;
  // A loop takes 1.2 to 1.4 of the time at 333 x 100.
  constexpr Rest kRest = is_compact<Operator, typename Operator::Gradient>() ? Rest::looped : Rest::unrolled;
  const Operator row = of_tile;
  constexpr Pairing pairing = pairing_of<Operator>();
  if constexpr (Operator::kGradRows && pairing == Pairing::none && (kConfig.both_sums || Operator::kSharedTerms)) {
    Folded<R> folded[2];
    fold_span<R, kRest>(begin, end, folded, [&](int64_t column, auto extent, Block<R>(&sums)[2]) NORMOPS_INLINE_LAMBDA {
      const Block<R> w = load_held<R>(scale + column);
      if (prefetches) row.prefetch_written(column);
      const auto terms = row.summed(column, extent);
      sums[0] = fma(terms.x, terms.x, sums[0]);
      sums[1] = fma(weighted<Operator>(terms, w, casting), terms.x, sums[1]);
    });
    squares = folded[0];
    dots = folded[1];
  } else {
    squares = fold_span<R, pairing == Pairing::none ? kRest : Rest::looped>(begin, end, squares_of_row(row));
    if constexpr (pairing != Pairing::none) {
      dots = fold_paired_dots<Operator, kRest>(row, paired, scale, begin, cols, casting);
    } else if constexpr (Operator::kGradRows) {
      const auto dot = dots_of_row<Operator>(row, scale, casting);
      dots =
          fold_span<R, kRest>(begin, end, [&](int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
            if (prefetches) row.prefetch_written(column);
            return dot(column, extent, sum);
          });
    }
  }
}

template <class R>
NORMOPS_INLINE void add_sums(const Folded<R> (&folded)[kBackwardTile], int count, double (&totals)[kBackwardTile]) {
  for (int first = 0; first < count; first += 4) {
    compute_t<R> sums[4];
    sums_of<R>(folded + first, sums);
    for (int r = 0; r < 4; r++) totals[first + r] += sums[r];
  }
}

// The first pass: forms the sums over each row of a tile; that of dy * w * x only if rows are written.
template <class Operator, class Casts>
[[gnu::noinline]] void sum_tile(const CpuArgs& args, BackwardTile<Operator>& tile, bool prefetches, Casts casts) {
  using R = typename Operator::Element;
  const PairedColumns paired = paired_columns(args.rotation);
  const Casting casting = casting_of(casts, args.casting);
  double squares[kBackwardTile] = {}, dots[kBackwardTile] = {};
  Folded<R> square_folds[kBackwardTile] = {}, dot_folds[kBackwardTile] = {};
  for (int64_t begin = 0; begin < args.cols; begin += kSpan) {
    const compute_t<R>* scale = tile.scale;
    for (int r = 0, left = tile.rows_per_group; r < tile.count; r++) {
      fold_row<Operator>(tile.rows[r], scale, begin, span_end(begin, args.cols), paired, args.cols, casting, prefetches,
                         square_folds[r], dot_folds[r]);
      if (--left == 0) scale += tile.stride, left = tile.rows_per_group;
    }
    add_sums<R>(square_folds, tile.count, squares);
    if (Operator::kGradRows) add_sums<R>(dot_folds, tile.count, dots);
  }
  if constexpr (Operator::kPlain) {
    if (wants_sums<Operator>(args)) {
      for (int r = 0; r < tile.count; r++) {
        *tile.sums[r].square_sum = static_cast<compute_t<R>>(squares[r]);
        *tile.sums[r].dot = static_cast<compute_t<R>>(dots[r]);
      }
      return;
    }
  }
  tile.set_sums(squares, dots, args.cols, args.eps);
}

// The same of rows whose sums are given.
template <class Operator>
void read_sums(const CpuArgs& args, BackwardTile<Operator>& tile) {
  using R = typename Operator::Element;
  double squares[kBackwardTile] = {}, dots[kBackwardTile] = {};
  for (int r = 0; r < tile.count; r++) {
    squares[r] = admitted_number<R>(*tile.sums[r].square_sum);
    dots[r] = admitted_number<R>(*tile.sums[r].dot);
  }
  tile.set_sums(squares, dots, args.size, args.eps);
}

// Whether rows may be written around the caches.
inline bool begins_with_lines(const CpuArgs& args) {
  return (!args.has(kGate) || args[kGate].dtype == args.dtype()) && begins_with_lines(args[kGradInput]) &&
         begins_with_lines(args[kGradGate]);
}

// A part of the problem: `rows` rows, from `row` on, of each of `groups` groups, from `group` on.
struct Region {
  int64_t row, rows;
  int64_t group, groups;
};

template <class Operator>
class BackwardRows {
 public:
  using R = typename Operator::Element;
  using Compute = compute_t<R>;
  using Tile = BackwardTile<Operator>;
  static constexpr Pairing kPairing = pairing_of<Operator>();
  // At run time, this choice takes up to 1.07 times the instructions where a row is short.
  static constexpr bool kForEitherCast =
      !is_compact<Operator, typename Operator::Gradient>() && sizeof(typename Operator::Gradient) == 2;
  // Rows of rare types are written one by one, which is less code.
  static constexpr bool kInPairs = kCommon<R> && kCommon<typename Operator::Gradient>;
  static constexpr bool kMayPrefetch = Operator::kGradRows && kConfig.may_prefetch;

  [[gnu::noinline]] BackwardRows(const CpuArgs& args, const Region& region)
      : args_(args),
        region_(region),
        prefetches_(kMayPrefetch && !wants_sums<Operator>(args) &&
                    region.rows * region.groups * args.cols * Operator::kAllBytes > kPrefetchBytes &&
                    (args.cols * static_cast<int64_t>(sizeof(R)) > kReadAheadRowBytes || args.weight.groups > 1 ||
                     Operator::kCostly)),
        streams_(prefetches_ && args.stream && kLanes<R> * sizeof(R) == 64 && begins_with_lines(args) &&
                 held_order<Operator>(args).has_lines(sizeof(R))),
        paired_(paired_columns(args.rotation)),
        held_cols_(held_cols<Operator>(args)),
        row_(region.row),
        group_(region.group + region.groups),
        shared_(args),
        tensors_(args, region.row),
        sums_(args, region.row) {
    const int64_t rows = kConfig.tile_bytes / (args.cols * Operator::kRowBytes);
    tile_rows_ = rows < kWriteRows ? kWriteRows : rows < kBackwardTile ? static_cast<int>(rows) : kBackwardTile;
    tile_rows_ -= tile_rows_ % kWriteRows;
  }

  // Fills the tile with the next rows, with none if there are no more.
  [[gnu::noinline]] void next_tile(Tile& tile) {
    const int64_t group_end = region_.group + region_.groups;
    if (group_ == group_end) next_rows();
    tile.count = 0;
    if (count_ == 0) return;
    tile.rows_per_group = count_;
    tile.stride = held_cols_;
    tile.scale = static_cast<const Compute*>(args_.scale) + group_ * held_cols_;
    tile.partial = static_cast<Compute*>(args_.grad_weight_partials);
    if (tile.partial != nullptr) tile.partial += (chunk_ * args_.weight.groups + group_) * held_cols_;
    tile.begins_chunk = row_ == chunk_ * args_.rows_per_chunk;
    do {
      tensors_.next_group();
      if (has_sums()) sums_.next_group();
      for (int r = 0; r < count_; r++) {
        tile.rows[tile.count] = Operator(tensors_.next(r), shared_, tile.count);
        if constexpr (Operator::kPlain) {
          if (has_sums()) tile.sums[tile.count] = SumsOfRow<Compute>(sums_.next(r));
        }
        tile.count++;
      }
    } while (++group_ < group_end && tile.count + count_ <= tile_rows_);
  }

  void sum(Tile& tile) const {
    if constexpr (Operator::kPlain) {
      if (args_.sums == Sums::given) return read_sums(args_, tile);
    }
    choose<kForEitherCast>(args_.casting.any(), [&](auto casts) {
      sum_tile<Operator>(args_, tile, kMayPrefetch && prefetches_ && !streams_, casts);
    });
  }

  // The second pass, over columns [begin, end) of the tile's rows: writes what is wanted of them, and adds their share
  // of grad_weight to the partials. `ahead` is the tile that comes next, to be prefetched.
  void write(const Tile& tile, const Tile& ahead, int64_t begin, int64_t end) const {
    choose<kForEitherCast>(args_.casting.any(), [&](auto casts) { write_groups(tile, ahead, begin, end, casts); });
    if (kMayPrefetch && streams_) finish_stream();
  }

 private:
  template <class Casts>
  void write_groups(const Tile& tile, const Tile& ahead, int64_t begin, int64_t end, Casts casts) const {
    // At run time, this choice takes 1.05 to 1.1 of the time on AVX2. Rounding takes more than choosing.
    constexpr bool kForEither =
        !is_compact<Operator, typename Operator::Gradient>() && !std::is_same_v<Casts, std::true_type>;
    const Compute* scale = tile.scale;
    Compute* partial = tile.partial;
    for (int r = 0; r < tile.count; r += tile.rows_per_group) {
      if constexpr (Operator::kGradRows) {
        choose<kForEither>(partial != nullptr, [&](auto wants_grad_weight) NORMOPS_INLINE_LAMBDA {
          if constexpr (Operator::kPlain) {
            choose<kForEither>(args_.has(kGradResidual), [&](auto has_residual) NORMOPS_INLINE_LAMBDA {
              write_group(tile, ahead, r, begin, end, scale, partial, wants_grad_weight, has_residual, casts);
            });
          } else {
            write_group(tile, ahead, r, begin, end, scale, partial, wants_grad_weight, std::false_type{}, casts);
          }
        });
      } else {
        write_group(tile, ahead, r, begin, end, scale, partial, std::true_type{}, std::false_type{}, casts);
      }
      scale += tile.stride;
      if (partial != nullptr) partial += tile.stride;
    }
  }

  // The rows of one group: those from `first` on.
  template <class WantsGradWeight, class HasResidual, class Casts>
  [[gnu::noinline]] void write_group(const Tile& tile, const Tile& ahead, int first, int64_t begin, int64_t end,
                                     const Compute* scale, Compute* partial, WantsGradWeight wants_grad_weight,
                                     HasResidual has_residual, Casts casts) const {
    const int64_t span = kPairing == Pairing::none ? kSpan : end;
    for (; begin < end; begin += span) {
      const int64_t last = begin + span < end ? begin + span : end;
      int r = first;
      if constexpr (kInPairs) {
        for (; r + kWriteRows <= first + tile.rows_per_group; r += kWriteRows) {
          write_rows<kWriteRows>(tile, ahead, r, begin, last, scale, partial, wants_grad_weight, has_residual, casts);
        }
      }
      for (; r < first + tile.rows_per_group; r++) {
        write_rows<1>(tile, ahead, r, begin, last, scale, partial, wants_grad_weight, has_residual, casts);
      }
    }
  }

  bool has_sums() const { return Operator::kPlain && args_.sums != Sums::formed; }

  // Goes on to the next rows of all groups in the region, as many as a tile may have of one group.
  void next_rows() {
    row_ += count_;
    group_ = region_.group;
    // A tile ends with its chunk, as the next chunk has partials of its own.
    chunk_ = row_ / args_.rows_per_chunk;
    const int64_t chunk_end = (chunk_ + 1) * args_.rows_per_chunk;
    const int64_t end = region_.row + region_.rows;
    const int64_t left = (chunk_end < end ? chunk_end : end) - row_;
    const int most = args_.weight.groups > 1 && tile_rows_ > kRowsPerGroup ? kRowsPerGroup : tile_rows_;
    count_ = static_cast<int>(left < most ? left : most);
    tensors_.next_rows(count_, group_);
    if (has_sums()) sums_.next_rows(count_, group_);
  }

  template <int kRows, class WantsGradWeight, class HasResidual, class Casts>
  NORMOPS_INLINE void write_rows(const Tile& tile, const Tile& next_tile, int first, int64_t begin, int64_t end,
                                 const Compute* scale, Compute* partial, WantsGradWeight wants_grad_weight,
                                 HasResidual has_residual, Casts casts) const {
    // Copies, as the compiler would have to assume of the originals that what is stored changes them.
    const bool prefetches = kMayPrefetch && (kRows > 1 || !kInPairs) && prefetches_, streams = prefetches && streams_;
    const Casting casting = casting_of(casts, args_.casting);
    Operator rows[kRows], ahead[kRows];
    Block<R> rstd[kRows], minus_c[kRows];
    for (int r = 0; r < kRows; r++) {
      rows[r] = tile.rows[first + r];
      ahead[r] = (prefetches && first + r < next_tile.count ? next_tile : tile).rows[first + r];
      rstd[r] = broadcast<R>(tile.rstd[first + r]);
      minus_c[r] = broadcast<R>(tile.minus_c[first + r]);
    }
    each_stretch<R, kPairing>(
        paired_, begin, end, [&](const auto& parts, int64_t begin, int64_t end) NORMOPS_INLINE_LAMBDA {
          constexpr int kCount = std::remove_reference_t<decltype(parts)>::kCount;
          for_each_block<R>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
            Block<R> w[kCount], dw[kCount];
            for (int p = 0; p < kCount; p++) {
              w[p] = load_held<R>(scale + parts.held(column, p));
              dw[p] = wants_grad_weight ? load_held<R>(partial + parts.held(column, p)) : Block<R>{};
            }
            typename Operator::Outputs outputs[kRows][kCount];
            if (prefetches) {
              for (const Operator& row : ahead) row.prefetch_read(column);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) {
              const auto terms = terms_of(rows[r], parts, column, extent);
              for (int p = 0; p < kCount; p++) {
                const auto& part = terms.part[p];
                const auto rest = [&]() NORMOPS_INLINE_LAMBDA {
                  // Not of the terms: beside a pointer, GCC 12 keeps them in memory, which takes up to four times as
                  // long.
                  if constexpr (Operator::kPlain) {
                    if (has_residual) return fma(minus_c[r], part.x, load<R>(rows[r].residual + column, extent));
                  }
                  return minus_c[r] * part.x;
                };
                // dw += dy * rstd * x
                // dx = dy * rstd * w - x * c + residual
                Block<R> dx;
                if (sizeof(typename Operator::Gradient) == 2 && casting.any()) {
                  const Block<R> normalized = cast<Operator>(part.x * rstd[r], casting.normalized);
                  const Block<R> dy = gradient_of<Operator>(part, casting);
                  dw[p] = dw[p] + cast<Operator>(dy * normalized, casting.normalized);
                  dx = fma(weighted<Operator>(part, w[p], casting), rstd[r], rest());
                } else {
                  const Block<R> scaled_dy = part.dy * rstd[r];
                  dw[p] = fma(scaled_dy, part.x, dw[p]);
                  dx = fma(scaled_dy, w[p], rest());
                }
                outputs[r][p] = part.outputs(dx, rstd[r], w[p]);
              }
            }
            // After the last load: rows often lie a multiple of 4096 bytes apart, and a load that follows a store with
            // the same low address bits waits for it.
            for (int p = 0; p < kCount; p++) {
#pragma GCC unroll 4
              for (int r = 0; r < kRows; r++) rows[r].store(parts.column(column, p), outputs[r][p], extent, streams);
              if (wants_grad_weight) store_held<R>(partial + parts.held(column, p), dw[p]);
            }
          });
        });
  }

  const CpuArgs& args_;
  const Region region_;
  const bool prefetches_, streams_;
  const PairedColumns paired_;
  const int64_t held_cols_;
  int tile_rows_;  // the most that a tile has
  // The rows that tiles are being made of: `count_` of each group, from `row_` on, all of one chunk. The tile that
  // comes next begins with those of group `group_`.
  int64_t row_;
  int count_ = 0;
  int64_t chunk_;
  int64_t group_;
  const typename Operator::Shared shared_;
  GroupedTensors<Operator> tensors_;
  GroupedTensors<SumsOfRow<Compute>> sums_;
};

template <class T>
void clear(compute_t<T>* partial, int64_t begin, int64_t end) {
  std::memset(partial + begin, 0, (padded_cols(kDType<T>, end) - begin) * sizeof(compute_t<T>));
}

// The first pass alone.
template <class Operator>
void sum_region(const CpuArgs& args, const Region& region) {
  BackwardRows<Operator> rows(args, region);
  BackwardTile<Operator> tile;
  for (rows.next_tile(tile); tile.count > 0; rows.next_tile(tile)) rows.sum(tile);
}

template <class Operator>
void backward_region(const CpuArgs& args, const Region& region) {
  using R = typename Operator::Element;
  BackwardRows<Operator> rows(args, region);
  // While one tile is written, the one that comes next is prefetched.
  BackwardTile<Operator> tiles[2];
  rows.next_tile(tiles[0]);
  for (int current = 0; tiles[current].count > 0; current ^= 1) {
    BackwardTile<Operator>&tile = tiles[current], &ahead = tiles[current ^ 1];
    if (tile.partial != nullptr && tile.begins_chunk) {
      clear<R>(tile.partial, 0, tile.count / tile.rows_per_group * tile.stride);
    }
    rows.next_tile(ahead);
    rows.sum(tile);
    rows.write(tile, ahead, 0, args.cols);
  }
}

template <class Operator>
void backward_parts(const CpuArgs& args, int64_t begin, int64_t end) {
  const int64_t rows = args.rows / args.weight.groups;
  while (begin < end) {
    const int64_t chunk = begin / args.weight.groups, group = begin % args.weight.groups;
    // Whole chunks, or, where a chunk is not whole, some of its groups.
    int64_t chunks = group == 0 ? (end - begin) / args.weight.groups : 0, groups = args.weight.groups;
    if (chunks == 0) {
      chunks = 1;
      groups = (groups - group < end - begin ? groups - group : end - begin);
    }
    const int64_t first = chunk * args.rows_per_chunk, last = first + chunks * args.rows_per_chunk;
    const Region region = {first, (last < rows ? last : rows) - first, group, groups};
    wants_sums<Operator>(args) ? sum_region<Operator>(args, region) : backward_region<Operator>(args, region);
    begin += chunks * groups;
  }
}

template <class Operator>
void backward_sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
  using R = typename Operator::Element;
  const int64_t group = row % args.weight.groups;
  GroupedTensors<Operator> tensors(args, row / args.weight.groups);
  tensors.next_rows(1, group);
  tensors.next_group();
  const Operator of_row(tensors.next(0), typename Operator::Shared(args), 0);
  sum_spans<R>(args.cols, begin, end, squares, squares_of_row(of_row));
  if (Operator::kGradRows) {
    sum_spans<R>(args.cols, begin, end, dots,
                 dots_of_row<Operator>(of_row, scale_of<Operator>(args, group), args.casting));
  } else {
    for (int64_t span = begin; span < end; span++) dots[span] = 0;
  }
}

template <class Operator>
void backward_columns(const CpuArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
  BackwardRows<Operator> rows(args, {row / args.weight.groups, 1, row % args.weight.groups, 1});
  BackwardTile<Operator> tile;
  rows.next_tile(tile);
  tile.set_sums({square_sum}, {dot}, args.size, args.eps);
  // In spans, so that what was cleared is still in the cache when it is added to.
  for (; begin < end; begin += kSpan) {
    const int64_t last = span_end(begin, end);
    if (tile.partial != nullptr && tile.begins_chunk) clear<typename Operator::Element>(tile.partial, begin, last);
    rows.write(tile, tile, begin, last);
  }
}

// The kernels of an operator's variants: choose(args, visit) calls visit.template operator()<Operator>() with one, if
// anything is to be written.
template <class Variants>
struct Backward {
  static void rows(const CpuArgs& args, int64_t begin, int64_t end) {
    Variants::choose(args, [&]<class Operator>() { backward_parts<Operator>(args, begin, end); });
  }
  static void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
    Variants::choose(args, [&]<class Operator>() { backward_sums<Operator>(args, row, begin, end, squares, dots); });
  }
  static void columns(const CpuArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
    Variants::choose(args,
                     [&]<class Operator>() { backward_columns<Operator>(args, row, square_sum, dot, begin, end); });
  }
  static constexpr BackwardKernels kKernels = {rows, sums, columns};
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
