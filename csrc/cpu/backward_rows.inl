// What the backward kernels have in common. Rows are those of an Operator and go through two passes, a tile of them at
// a time: the first pass forms the sums over each row, the second one writes what is wanted of it and adds its share to
// the partials of grad_weight.
#include "backward_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

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
    tile.scale = static_cast<const Compute*>(args_.scale) + (group_ - args_.first_group) * held_cols_;
    tile.partial = partial(args_.grad_weight_partials);
    tile.bias_partial = partial(args_.grad_bias_partials);
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
    // Before a gradient is written over it.
    if (kPairing == Pairing::none && tile.bias_partial != nullptr) sum_grad_output(tile, begin, end);
    if (!Operator::kGradRows && tile.partial == nullptr) return;  // that was all
    choose<kForEitherCast>(args_.casting.any(), [&](auto casts) { write_groups(tile, ahead, begin, end, casts); });
    if (kMayPrefetch && streams_) finish_stream();
  }

 private:
  // Of the current chunk and group.
  Compute* partial(void* partials) const {
    if (partials == nullptr) return nullptr;
    return static_cast<Compute*>(partials) + (chunk_ * args_.weight.groups + group_ - args_.first_group) * held_cols_;
  }

  // Adds the rows of grad_output to the partials of grad_bias, while they are still in the cache.
  [[gnu::noinline]] void sum_grad_output(const Tile& tile, int64_t begin, int64_t end) const {
    Compute* sums = tile.bias_partial;
    for (int first = 0; first < tile.count; first += tile.rows_per_group, sums += tile.stride) {
      for_each_block<R>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
        Block<R> sum = load_held<R>(sums + column);
        for (int r = first; r < first + tile.rows_per_group; r++) {
          sum = sum + load<R>(tile.rows[r].grad_output + column, extent);
        }
        store_held<R>(sums + column, sum);
      });
    }
  }

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
    each_segment<R, kPairing>(
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

// Begins the partials of a tile, columns [begin, end).
template <class Operator>
void clear(const BackwardTile<Operator>& tile, int64_t begin, int64_t end) {
  using R = typename Operator::Element;
  if (!tile.begins_chunk) return;
  for (compute_t<R>* partial : {tile.partial, tile.bias_partial}) {
    if (partial == nullptr) continue;
    std::memset(partial + begin, 0, (padded_cols(kDType<R>, end) - begin) * sizeof(compute_t<R>));
  }
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
  BackwardRows<Operator> rows(args, region);
  // While one tile is written, the one that comes next is prefetched.
  BackwardTile<Operator> tiles[2];
  rows.next_tile(tiles[0]);
  for (int current = 0; tiles[current].count > 0; current ^= 1) {
    BackwardTile<Operator>&tile = tiles[current], &ahead = tiles[current ^ 1];
    clear(tile, 0, tile.count / tile.rows_per_group * tile.stride);
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
    clear(tile, begin, last);
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
