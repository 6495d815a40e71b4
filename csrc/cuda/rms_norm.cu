// rms_norm: y = x * rstd * w. The sum of the squares of each row may be given, or be all that is wanted: kernels with
// general access ask.
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// Rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_kernel(const Forward<T, T, Access> args, const typename Access::template Rows<const T> input,
                    const typename Access::template Sums<compute_t<T>, 1> stats) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared, !stats.are(Sums::given));
  const Columns<T, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  wait_for_previous_kernel();
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input, input.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  if (stats.are(Sums::wanted)) {
    compute_t<T> sums[kRows];
    sum_squares<T>(x, sums, sum_row);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.write(columns, sums + r, rows.first, rows.further(r));
    }
    return;
  }
  const auto sum_or_read = [&](compute_t<T>(&sums)[kRows]) {
    if (stats.are(Sums::formed)) return sum_row(sums);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.read(sums + r, rows.first, rows.further(r));
    }
  };
  normalize_rows(args, args.scale.of_group(block.group, args.cols), rows, columns, x, sum_or_read);
}

// Rows of any width: read twice, the second time from the L2 cache as far as it holds them.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_any_width_kernel(const Forward<T, T, General> args, const RowsOf<const T> input,
                              const SumsOfRows<compute_t<T>, 1> stats) {
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const Columns<T, int64_t> columns(args.cols);
  const T* const x = input.row(row);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); };
  wait_for_previous_kernel();
  compute_t<T> sum;
  if (stats.are(Sums::given)) {
    stats.read(&sum, row);
  } else {
    sum = square_sum_of_any_width<T>(columns, load_pack);
  }
  if (stats.are(Sums::wanted)) {
    stats.write(columns, &sum, row);
  } else {
    normalize_summed(args, columns, sum, load_pack);
  }
}

}  // namespace

void launch_rms_norm(const KernelArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype(), [&]<class T>() {
    const auto forward = forward_of<T, T>(args);
    const auto input = rows_of<const T, T>(args[kInput], args.cols);
    const RowConfig& config = row_config(packs_of<T>(args.cols), device);
    dispatch_forward<T>(args.rows, args.weight.groups, config, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(rms_norm_any_width_kernel<T>, shape, stream, forward, input, SumsOfRows<compute_t<T>, 1>(args));
      } else {
        const auto launch_with = [&]<class Access>() {
          launch(rms_norm_kernel<T, kPacks, Access>, shape, stream, forward.template as<Access>(),
                 typename Access::template Rows<const T>(input), typename Access::template Sums<compute_t<T>, 1>(args));
        };
        if (args.sums != Sums::formed) return launch_with.template operator()<General>();
        dispatch_access<kPacks>(forward.scale, launch_with, forward.output, input);
      }
    });
  });
}

}  // namespace normops::cuda
