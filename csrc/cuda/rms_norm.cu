// rms_norm: y = x * rstd * w
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// Rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_kernel(const Forward<T, T, Access> args, const typename Access::template Rows<const T> input) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const Columns<T, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  wait_for_previous_kernel();
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input, input.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  normalize_rows(args, args.scale.of_group(block.group, args.cols), rows, columns, x, sum_row);
}

// Rows of any width: read twice, the second time from the L2 cache as far as it holds them.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_any_width_kernel(const Forward<T, T, General> args, const RowsOf<const T> input) {
  const T* const row = input.row(BlockRows(args.groups.count, 1).first);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, row, column, count); };
  normalize_any_width(args, Columns<T, int64_t>(args.cols), load_pack, load_pack);
}

}  // namespace

void launch_rms_norm(const RmsNormArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype, [&]<class T>() {
    const auto forward = forward_of<T, T>(args);
    const auto input = rows_of<const T, T>(args.input, args.input_rows, args.cols);
    const RowConfig& config = row_config(packs_of<T>(args.cols), device);
    dispatch_forward(args.rows, args.weight.groups, config, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(rms_norm_any_width_kernel<T>, shape, stream, forward, input);
      } else {
        const auto launch_with = [&]<class Access>() {
          launch(rms_norm_kernel<T, kPacks, Access>, shape, stream, forward.template as<Access>(),
                 typename Access::template Rows<const T>(input));
        };
        dispatch_access<kPacks>(forward.scale, launch_with, forward.output, input);
      }
    });
  });
}

}  // namespace normops::cuda
