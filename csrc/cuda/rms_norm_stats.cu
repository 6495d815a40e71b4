// rms_norm_stats: the sum of the squares of each row. rms_norm_from_stats: y = x * rstd * w, where that sum is given.
#include "forward_rows.cuh"
#include "rms_norm_stats_launch.h"

namespace normops::cuda {
namespace {

// Rows that fit into registers, as those of rms_norm.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_stats_kernel(const int64_t count, const int64_t cols, const typename Access::template Rows<const T> input,
                          const typename Access::template Rows<compute_t<T>> square_sum) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const Columns<T, int> columns(cols);
  const TakenRows rows(BlockRows(1, kRows * blockDim.y), count, 1);
  wait_for_previous_kernel();
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input, input.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  compute_t<T> sums[kRows];
  sum_squares<T>(x, sums, sum_row);
  if (!columns.has_first()) return;
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    if (rows.has(r)) *square_sum.row(rows.first, rows.further(r)) = sums[r];
  }
}

template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_stats_any_width_kernel(const int64_t cols, const RowsOf<const T> input,
                                    const RowsOf<compute_t<T>> square_sum) {
  const int64_t row = BlockRows(1, 1).first;
  const T* const x = input.row(row);
  const Columns<T, int64_t> columns(cols);
  wait_for_previous_kernel();
  const compute_t<T> sum = square_sum_of_any_width<T>(
      columns, [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); });
  if (columns.has_first()) *square_sum.row(row) = sum;
}

// In the place of RowSums.
template <class Number, int kCount>
struct GivenSums {
  Number given[kCount] = {};

  __device__ void operator()(Number (&sums)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] = given[i];
  }
};

template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_from_stats_kernel(const Forward<T, T, Access> args, const typename Access::template Rows<const T> input,
                               const typename Access::template Rows<const compute_t<T>> square_sum) {
  constexpr int kRows = rows_in_flight(kPacks);
  const Columns<T, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  wait_for_previous_kernel();
  GivenSums<compute_t<T>, kRows> sums;
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    if (rows.has(r)) sums.given[r] = *square_sum.row(rows.first, rows.further(r));
    load_packs<T>(x[r], input, input.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  normalize_rows(args, args.scale.of_group(block.group, args.cols), rows, columns, x, sums);
}

template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_from_stats_any_width_kernel(const Forward<T, T, General> args, const RowsOf<const T> input,
                                         const RowsOf<const compute_t<T>> square_sum) {
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const T* const x = input.row(row);
  wait_for_previous_kernel();
  normalize_summed(args, Columns<T, int64_t>(args.cols), *square_sum.row(row),
                   [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); });
}

}  // namespace

void launch_rms_norm_stats(const RmsNormStatsArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype, [&]<class T>() {
    const auto input = rows_of<const T, T>(args.input, args.input_rows, args.cols);
    const auto square_sum = numbers_of<compute_t<T>>(args.square_sum, args.square_sum_rows);
    const RowConfig& config = row_config(packs_of<T>(args.cols), device);
    dispatch_forward(args.rows, 1, config, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(rms_norm_stats_any_width_kernel<T>, shape, stream, args.cols, input, square_sum);
      } else {
        const auto launch_with = [&]<class Access>() {
          launch(rms_norm_stats_kernel<T, kPacks, Access>, shape, stream, args.rows, args.cols,
                 typename Access::template Rows<const T>(input),
                 typename Access::template Rows<compute_t<T>>(square_sum));
        };
        dispatch_plain<kPacks, T>(true, launch_with, input, square_sum);
      }
    });
  });
}

void launch_rms_norm_from_stats(const RmsNormFromStatsArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype, [&]<class T>() {
    auto forward = forward_of<T, T>(args);
    forward.inverse_cols = 1.0 / static_cast<double>(args.size);
    const auto input = rows_of<const T, T>(args.input, args.input_rows, args.cols);
    const auto square_sum = numbers_of<const compute_t<T>>(args.square_sum, args.square_sum_rows);
    const RowConfig& config = from_stats_config(row_config(packs_of<T>(args.cols), device));
    dispatch_forward(args.rows, args.weight.groups, config, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(rms_norm_from_stats_any_width_kernel<T>, shape, stream, forward, input, square_sum);
      } else if constexpr (kPacks <= kMostPacksFromStats) {
        const auto launch_with = [&]<class Access>() {
          launch(rms_norm_from_stats_kernel<T, kPacks, Access>, shape, stream, forward.template as<Access>(),
                 typename Access::template Rows<const T>(input),
                 typename Access::template Rows<const compute_t<T>>(square_sum));
        };
        dispatch_plain<kPacks, T>(forward.scale.is_plain_of_one_group(), launch_with, forward.output, input,
                                  square_sum);
      }
    });
  });
}

}  // namespace normops::cuda
