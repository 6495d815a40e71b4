// rms_norm: y = x * rstd * w
#include "rms_norm_row.cuh"

namespace normops::cuda {
namespace {

template <class T>
struct Forward {
  int64_t rows;
  int64_t cols;
  double inverse_cols;
  double eps;
  ScaleOf<T> scale;
  RowsOf<const T> input;
  RowsOf<T> output;
};

template <class T>
__device__ Pack<T> scaled(const Pack<T>& pack, compute_t<T> rstd, const Numbers<T>& scale) {
  Numbers<T> numbers = to_compute<T>(pack);
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) numbers.element[i] = numbers.element[i] * rstd * scale.element[i];
  return from_compute<T>(numbers);
}

// Rows that fit into registers: each element is read once. kPacks packs of a row to a thread.
template <class T, int kPacks>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks)) rms_norm_kernel(const Forward<T> args) {
  using Compute = compute_t<T>;
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<Compute, kRows> shared;
  const Columns<T, int> columns(args.cols);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / cluster_blocks()) * kRows * blockDim.y + threadIdx.y;

  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int64_t row = first_row + r * blockDim.y;
    load_packs<T>(x[r], row < args.rows ? args.input.row(row) : nullptr, columns, args.input.aligned);
  }

  Compute rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    Compute chains[kChains<T>] = {};
#pragma unroll
    for (int p = 0; p < kPacks; p++) add_squares<T>(x[r][p], chains);
    rstd[r] = fold(chains);
  }
  sum_row(rstd, shared, 0);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    rstd[r] = rstd_of(rstd[r], args.inverse_cols, args.eps);
    keep_packed<T>(x[r]);
  }

#pragma unroll
  for (int p = 0; p < kPacks; p++) {
    const int column = columns.column(p), count = columns.count(p);
    const Numbers<T> scale = args.scale.load(column, count);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t row = first_row + r * blockDim.y;
      if (row >= args.rows) break;
      store_pack(args.output.row(row) + column, scaled<T>(x[r][p], rstd[r], scale), count, args.output.aligned);
    }
    keep_few_registers<kPacks>();
  }
  end_row_sums();
}

// Rows of any width: read twice, the second time from the L2 cache as far as it holds them.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads) rms_norm_any_width_kernel(const Forward<T> args) {
  using Compute = compute_t<T>;
  __shared__ RowSumShared<double, 1> shared;
  const Columns<T, int64_t> columns(args.cols);
  const T* const source = args.input.row(blockIdx.x);
  T* const target = args.output.row(blockIdx.x);

  double square_sum[1] = {};
  for (int64_t first = 0; columns.count(first) > 0; first += kPacksOfChain) {
    Compute chains[kChains<T>] = {};
#pragma unroll
    for (int p = 0; p < kPacksOfChain; p++) {
      add_squares<T>(load_pack(source + columns.column(first + p), columns.count(first + p), args.input.aligned),
                     chains);
    }
    square_sum[0] += fold(chains);
  }
  sum_row(square_sum, shared, 0);
  const Compute rstd = rstd_of(static_cast<Compute>(square_sum[0]), args.inverse_cols, args.eps);

  for (int64_t p = 0; columns.count(p) > 0; p++) {
    const int64_t column = columns.column(p), count = columns.count(p);
    const Pack<T> x = load_pack(source + column, count, args.input.aligned);
    store_pack(target + column, scaled<T>(x, rstd, args.scale.load(column, count)), count, args.output.aligned);
  }
}

}  // namespace

void launch_rms_norm(const RmsNormArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype, [&]<class T>() {
    const Forward<T> forward = {args.rows,
                                args.cols,
                                1.0 / static_cast<double>(args.cols),
                                args.eps,
                                scale_of<T>(args.weight, args.cols),
                                rows_of<const T>(args.input, args.input_rows, args.cols),
                                rows_of<T>(args.output, args.output_rows, args.cols)};
    const RowConfig& config = row_config((args.cols + kPack<T> - 1) / kPack<T>, device);
    const dim3 block = block_of(config);
    dispatch_packs(config.packs, [&]<int kPacks>() {
      if constexpr (kPacks == 0) {
        const LaunchShape shape = {dim3(static_cast<unsigned>(args.rows)), block, 0, 1};
        launch(rms_norm_any_width_kernel<T>, shape, stream, forward);
      } else {
        const int64_t blocks = blocks_of_rows(args.rows, static_cast<int64_t>(block.y) * rows_in_flight(kPacks));
        const LaunchShape shape = {dim3(static_cast<unsigned>(blocks * config.cluster)), block, 0, config.cluster};
        launch(rms_norm_kernel<T, kPacks>, shape, stream, forward);
      }
    });
  });
}

}  // namespace normops::cuda
