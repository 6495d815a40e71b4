// The loops of the backward kernels. For each row h, the scale w, and the gradient dy of h * rstd * w:
//   dh = dy * rstd * w - h * rstd^3 * mean(dy * w * h) + residual
//   dw = the sum over rows of dy * rstd * h
// Rows are processed in tiles, in two passes. The first pass sums over each row. The second pass writes the gradients
// and adds to the sums of the current leaf. Read from the end: backward_region() loops over tiles,
// BackwardRows::write() is the second pass, write_rows() has the formulas.
#include "backward_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Returns whether rows permit non-temporal stores.
inline bool begins_with_lines(const CpuArgs& args) {
  return (!args.has(kGate) || args[kGate].dtype == args.dtype()) && begins_with_lines(args[kGradInput]) &&
         begins_with_lines(args[kGradGate]);
}

template <class RowOp>
class BackwardRows {
 public:
  using R = typename RowOp::Element;
  using Compute = compute_t<R>;
  using Tile = BackwardTile<RowOp>;
  static constexpr Pairing kPairing = pairing_of<RowOp>();
  // A run-time branch takes up to 1.07 times the instructions if rows are short.
  static constexpr bool kForEitherRounding =
      !branches_at_run_time<RowOp, typename RowOp::Gradient>() && sizeof(typename RowOp::Gradient) == 2;
  // Rows of rare types are written one by one, which is less code.
  static constexpr bool kInPairs = kHasFastPath<R> && kHasFastPath<typename RowOp::Gradient>;
  static constexpr bool kMayPrefetch = RowOp::kGradRows && kConfig.may_prefetch;

  // `first_leaf`: the first leaf of the sums.
  [[gnu::noinline]] BackwardRows(const CpuArgs& args, const Region& region, int64_t first_leaf)
      : args_(args),
        region_(region),
        first_leaf_(first_leaf),
        prefetches_(kMayPrefetch && !wants_sums<RowOp>(args) &&
                    args.part_rows * args.cols * RowOp::kAllBytes > kPrefetchBytes &&
                    (args.cols * static_cast<int64_t>(sizeof(R)) > kReadAheadRowBytes || args.weight.groups > 1 ||
                     RowOp::kComputeBound)),
        non_temporal_(prefetches_ && args.non_temporal && kLanes<R> * sizeof(R) == 64 && begins_with_lines(args) &&
                      scale_layout<RowOp>(args).has_lines(sizeof(R))),
        paired_(paired_columns(args.rotation)),
        packed_cols_(packed_cols<RowOp>(args)),
        row_(region.row),
        group_(region.group + region.groups),
        shared_(args),
        tensors_(args, region.row),
        sums_(args, region.row) {
    const int64_t rows = kConfig.tile_bytes / (args.cols * RowOp::kRowBytes);
    tile_rows_ = rows < kWriteRows ? kWriteRows : rows < kBackwardTile ? static_cast<int>(rows) : kBackwardTile;
    tile_rows_ -= tile_rows_ % kWriteRows;
  }

  // Fills the tile with the next rows. The tile is empty if no rows remain.
  [[gnu::noinline]] void next_tile(Tile& tile) {
    const int64_t group_end = region_.group + region_.groups;
    if (group_ == group_end) next_rows();
    tile.count = 0;
    if (count_ == 0) return;
    tile.rows_per_group = count_;
    tile.stride = packed_cols_;
    tile.scale = static_cast<const Compute*>(args_.scale) + (group_ - args_.first_group) * packed_cols_;
    tile.weight_sum = sum_of_leaf(args_.grad_weight_sums);
    tile.bias_sum = sum_of_leaf(args_.grad_bias_sums);
    tile.begins_leaf = row_ == leaf_ * args_.rows_per_leaf;
    tile.merges = row_ + count_ == leaf_end_ ? merges_after(first_leaf_, leaf_ + 1) : 0;
    do {
      tensors_.next_group();
      if (has_sums()) sums_.next_group();
      for (int r = 0; r < count_; r++) {
        tile.rows[tile.count] = RowOp(tensors_.next(r), shared_, tile.count);
        if constexpr (RowOp::kTakesResidualAndSums) {
          if (has_sums()) tile.sums[tile.count] = SumsOfRow<Compute>(sums_.next(r));
        }
        tile.count++;
      }
    } while (++group_ < group_end && tile.count + count_ <= tile_rows_);
  }

  void sum(Tile& tile) const {
    if constexpr (RowOp::kTakesResidualAndSums) {
      if (args_.sums == Sums::input) return read_sums(args_, tile);
    }
    dispatch_bool<kForEitherRounding>(args_.rounding.any(), [&](auto casts) {
      sum_tile<RowOp>(args_, tile, kMayPrefetch && prefetches_ && !non_temporal_, casts);
    });
  }

  // The second pass: writes the requested gradients, and adds to the sums for grad_weight and grad_bias. Prefetches
  // `ahead`, the next tile.
  void write(const Tile& tile, const Tile& ahead) const {
    // Sums grad_output before a gradient overwrites it.
    if (kPairing == Pairing::none && tile.bias_sum != nullptr) sum_grad_output(tile);
    if (!RowOp::kGradRows && tile.weight_sum == nullptr) return;  // only grad_bias is requested
    dispatch_bool<kForEitherRounding>(args_.rounding.any(), [&](auto casts) { write_groups(tile, ahead, casts); });
    if (kMayPrefetch && non_temporal_) finish_non_temporal();
  }

 private:
  // Returns the sum of the current group, which follows the remaining sums of previous leaves.
  Compute* sum_of_leaf(void* sums) const {
    if (sums == nullptr) return nullptr;
    return static_cast<Compute*>(sums) + sums_before_ * args_.sum_stride + (group_ - args_.first_group) * packed_cols_;
  }

  // Adds the rows of grad_output to the sum for grad_bias, while they are still in the cache.
  [[gnu::noinline]] void sum_grad_output(const Tile& tile) const {
    Compute* of_group = tile.bias_sum;
    for (int first = 0; first < tile.count; first += tile.rows_per_group, of_group += tile.stride) {
      for_each_block<R>(0, args_.cols, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
        Block<R> sum = load_packed<R>(of_group + column);
        for (int r = first; r < first + tile.rows_per_group; r++) {
          sum = sum + load<R>(tile.rows[r].grad_output + column, extent);
        }
        store_packed<R>(of_group + column, sum);
      });
    }
  }

  template <class Casts>
  void write_groups(const Tile& tile, const Tile& ahead, Casts casts) const {
    // A run-time branch takes 1.05 to 1.1 of the time on AVX2. Rounding takes longer than the branch.
    constexpr bool kForEither =
        !branches_at_run_time<RowOp, typename RowOp::Gradient>() && !std::is_same_v<Casts, std::true_type>;
    const Compute* scale = tile.scale;
    Compute* weight_sum = tile.weight_sum;
    for (int r = 0; r < tile.count; r += tile.rows_per_group) {
      if constexpr (RowOp::kGradRows) {
        dispatch_bool<kForEither>(weight_sum != nullptr, [&](auto wants_grad_weight) NORMOPS_INLINE_LAMBDA {
          if constexpr (RowOp::kTakesResidualAndSums) {
            dispatch_bool<kForEither>(args_.has(kGradResidual), [&](auto has_residual) NORMOPS_INLINE_LAMBDA {
              write_group(tile, ahead, r, scale, weight_sum, wants_grad_weight, has_residual, casts);
            });
          } else {
            write_group(tile, ahead, r, scale, weight_sum, wants_grad_weight, std::false_type{}, casts);
          }
        });
      } else {
        write_group(tile, ahead, r, scale, weight_sum, std::true_type{}, std::false_type{}, casts);
      }
      scale += tile.stride;
      if (weight_sum != nullptr) weight_sum += tile.stride;
    }
  }

  // Writes the rows of one group, from row `first` of the tile on.
  template <class WantsGradWeight, class HasResidual, class Casts>
  [[gnu::noinline]] void write_group(const Tile& tile, const Tile& ahead, int first, const Compute* scale,
                                     Compute* weight_sum, WantsGradWeight wants_grad_weight, HasResidual has_residual,
                                     Casts casts) const {
    const int64_t end = args_.cols, span = kPairing == Pairing::none ? kSpan : end;
    for (int64_t begin = 0; begin < end; begin += span) {
      const int64_t last = begin + span < end ? begin + span : end;
      int r = first;
      if constexpr (kInPairs) {
        for (; r + kWriteRows <= first + tile.rows_per_group; r += kWriteRows) {
          write_rows<kWriteRows>(tile, ahead, r, begin, last, scale, weight_sum, wants_grad_weight, has_residual,
                                 casts);
        }
      }
      for (; r < first + tile.rows_per_group; r++) {
        write_rows<1>(tile, ahead, r, begin, last, scale, weight_sum, wants_grad_weight, has_residual, casts);
      }
    }
  }

  bool has_sums() const { return RowOp::kTakesResidualAndSums && args_.sums != Sums::compute; }

  // Advances to the next rows of all groups in the region, as many as a tile may have of one group.
  void next_rows() {
    row_ += count_;
    group_ = region_.group;
    if (row_ >= leaf_end_) next_leaf();
    // A tile ends with its leaf, as the next leaf has other sums.
    const int64_t end = region_.row + region_.rows, left = (leaf_end_ < end ? leaf_end_ : end) - row_;
    const int most = region_.groups > 1 && tile_rows_ > kRowsPerGroup ? kRowsPerGroup : tile_rows_;
    count_ = static_cast<int>(left < most ? left : most);
    tensors_.next_rows(count_, group_);
    if (has_sums()) sums_.next_rows(count_, group_);
  }

  // Sets the leaf of the current row.
  void next_leaf() {
    const int64_t rows = args_.rows / args_.weight.groups;
    leaf_ = row_ / args_.rows_per_leaf;
    const int64_t first = leaf_ * args_.rows_per_leaf;
    leaf_end_ = rows - first > args_.rows_per_leaf ? first + args_.rows_per_leaf : rows;
    sums_before_ = sum_count(first_leaf_, leaf_);
  }

  template <int kRows, class WantsGradWeight, class HasResidual, class Casts>
  NORMOPS_INLINE void write_rows(const Tile& tile, const Tile& next_tile, int first, int64_t begin, int64_t end,
                                 const Compute* scale, Compute* weight_sum, WantsGradWeight wants_grad_weight,
                                 HasResidual has_residual, Casts casts) const {
    // Uses copies, as the compiler must assume that stores change the originals.
    const bool prefetches = kMayPrefetch && (kRows > 1 || !kInPairs) && prefetches_,
               non_temporal = prefetches && non_temporal_;
    const Rounding rounding = rounding_of(casts, args_.rounding);
    RowOp rows[kRows], ahead[kRows];
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
              w[p] = load_packed<R>(scale + parts.packed(column, p));
              dw[p] = wants_grad_weight ? load_packed<R>(weight_sum + parts.packed(column, p)) : Block<R>{};
            }
            typename RowOp::Outputs outputs[kRows][kCount];
            if (prefetches) {
              for (const RowOp& row : ahead) row.prefetch_read(column);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) {
              const auto terms = terms_of(rows[r], parts, column, extent);
              for (int p = 0; p < kCount; p++) {
                const auto& part = terms.part[p];
                const auto rest = [&]() NORMOPS_INLINE_LAMBDA {
                  // The residual is not part of the terms: with a pointer to it, GCC 12 keeps the terms in memory,
                  // which takes up to four times as long.
                  if constexpr (RowOp::kTakesResidualAndSums) {
                    if (has_residual) return fma(minus_c[r], part.h, load<R>(rows[r].residual + column, extent));
                  }
                  return minus_c[r] * part.h;
                };
                // dw += dy * rstd * h
                // dh = dy * rstd * w - h * c + residual, with c = rstd^3 * mean(dy * w * h)
                Block<R> dh;
                if (sizeof(typename RowOp::Gradient) == 2 && rounding.any()) {
                  const Block<R> normalized = round_if<RowOp>(part.h * rstd[r], rounding.normalized);
                  const Block<R> dy = gradient_of<RowOp>(part, rounding);
                  dw[p] = dw[p] + round_if<RowOp>(dy * normalized, rounding.normalized);
                  dh = fma(weighted<RowOp>(part, w[p], rounding), rstd[r], rest());
                } else {
                  const Block<R> scaled_dy = part.dy * rstd[r];
                  dw[p] = fma(scaled_dy, part.h, dw[p]);
                  dh = fma(scaled_dy, w[p], rest());
                }
                outputs[r][p] = part.outputs(dh, rstd[r], w[p]);
              }
            }
            // Stores follow the last load: rows are often a multiple of 4096 bytes apart, and a load waits for an
            // earlier store with the same low address bits.
            for (int p = 0; p < kCount; p++) {
#pragma GCC unroll 4
              for (int r = 0; r < kRows; r++)
                rows[r].store(parts.column(column, p), outputs[r][p], extent, non_temporal);
              if (wants_grad_weight) store_packed<R>(weight_sum + parts.packed(column, p), dw[p]);
            }
          });
        });
  }

  const CpuArgs& args_;
  const Region region_;
  const int64_t first_leaf_;
  const bool prefetches_, non_temporal_;
  const RotaryColumns paired_;
  const int64_t packed_cols_;
  int tile_rows_;  // the maximum rows of a tile
  // The rows that the next tiles consist of: `count_` of each group, from `row_` on, all of one leaf. The next tile
  // begins with group `group_`.
  int64_t row_;
  int count_ = 0;
  int64_t group_;
  int64_t leaf_, leaf_end_ = 0;  // the leaf of row_, and its end
  int64_t sums_before_;          // that remain of the leaves before it
  const typename RowOp::Shared shared_;
  GroupedTensors<RowOp> tensors_;
  GroupedTensors<SumsOfRow<Compute>> sums_;
};

// Clears the sums if the tile begins a leaf.
template <class RowOp>
void clear(const BackwardTile<RowOp>& tile, int64_t numbers) {
  if (!tile.begins_leaf) return;
  for (auto* sum : {tile.weight_sum, tile.bias_sum}) {
    if (sum != nullptr) std::memset(sum, 0, numbers * sizeof(*sum));
  }
}

// Adds the last sums after a tile that ends its leaf.
template <class RowOp>
[[gnu::noinline]] void add_last_sums(const CpuArgs& args, const BackwardTile<RowOp>& tile, int64_t numbers) {
  using R = typename RowOp::Element;
  for (compute_t<R>* last : {tile.weight_sum, tile.bias_sum}) {
    if (last == nullptr) continue;
    for (int64_t column = 0; column < numbers; column += kLanes<R>) {
      compute_t<R>* packed = last + column;
      Block<R> sum = load_packed<R>(packed);
      for (int added = 0; added < tile.merges; added++) {
        packed -= args.sum_stride;
        sum = load_packed<R>(packed) + sum;
      }
      store_packed<R>(packed, sum);
    }
  }
}

// Runs only the first pass.
template <class RowOp>
void sum_region(const CpuArgs& args, const Region& region) {
  BackwardRows<RowOp> rows(args, region, 0);
  BackwardTile<RowOp> tile;
  for (rows.next_tile(tile); tile.count > 0; rows.next_tile(tile)) rows.sum(tile);
}

template <class RowOp>
void backward_region(const CpuArgs& args, const Region& region) {
  BackwardRows<RowOp> rows(args, region, region.row / args.rows_per_leaf);
  // The next tile is prefetched while the current one is written.
  BackwardTile<RowOp> tiles[2];
  rows.next_tile(tiles[0]);
  for (int current = 0; tiles[current].count > 0; current ^= 1) {
    BackwardTile<RowOp>&tile = tiles[current], &ahead = tiles[current ^ 1];
    const int64_t numbers = tile.count / tile.rows_per_group * tile.stride;
    clear(tile, numbers);
    rows.next_tile(ahead);
    rows.sum(tile);
    rows.write(tile, ahead);
    if (tile.merges > 0) add_last_sums(args, tile, numbers);
  }
}

// The kernels of an operator's variants: dispatch_row_op(args, visit) calls visit.template operator()<RowOp>() with the
// selected RowOp, unless no output is requested.
template <class Variants>
struct BackwardKernelsOf {
  static void rows(const CpuArgs& args, const Region& region) {
    Variants::dispatch_row_op(args, [&]<class RowOp>() {
      wants_sums<RowOp>(args) ? sum_region<RowOp>(args, region) : backward_region<RowOp>(args, region);
    });
  }
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
