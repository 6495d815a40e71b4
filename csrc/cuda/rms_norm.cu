// rms_norm. The sum of squares of each row may be an input or the only output: kernels with general access check.
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// output = input * rsqrt(mean(input^2) + eps) * (weight + weight_offset) + bias
// For rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                    const SumsOfRows<compute_t<T>, 1> stats, const BiasOf<T> bias) {
  const Sums kind = stats.template kind<Access>();
  const auto& input_rows = view<Access>(input);
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared, kind != Sums::input);
  const Columns<T, int> columns(args.cols);
  const TakenRows rows(args.rows, group_count<Access>(args), kRows);
  pdl_wait(args.pdl);
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input_rows, input_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
  }
  if (kind == Sums::output) {
    compute_t<T> sums[kRows];
    sum_squares<T>(x, sums, sum_row);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.write(columns, sums + r, rows.first, rows.row_offset(r));
    }
    return;
  }
  const auto sum_or_read = [&](compute_t<T>(&sums)[kRows]) {
    if (kind == Sums::compute) return sum_row(sums);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.read(sums + r, rows.first, rows.row_offset(r));
    }
  };
  if constexpr (!kIsPlain<Access>) {
    normalize_rows<Access>(args, output, rows, columns, x, sum_or_read, [&](Numbers<T>(&y)[1], int r, int p) {
      bias.add(y[0], rows.first, rows.row_offset(r), columns.column(p), rows.has(r) ? columns.count(p) : 0);
    });
  } else {
    normalize_rows<Access>(args, output, rows, columns, x, sum_or_read);
  }
}

// The same for rows of any width, which are read twice: the second time from the L2 cache if it holds them.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_any_width_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                              const SumsOfRows<compute_t<T>, 1> stats, const BiasOf<T> bias) {
  const int64_t row = BlockRows(args.groups, 1).first;
  const Columns<T, int64_t> columns(args.cols);
  const T* const x = input.row(row);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); };
  pdl_wait(args.pdl);
  compute_t<T> sum;
  if (stats.what == Sums::input) {
    stats.read(&sum, row);
  } else {
    sum = square_sum_of_any_width<T>(columns, load_pack);
  }
  if (stats.what == Sums::output) {
    stats.write(columns, &sum, row);
  } else {
    normalize_summed(args, output, columns, sum, load_pack, [&](Numbers<T>(&y)[1], int64_t p) {
      bias.add(y[0], row, 0, columns.column(p), columns.count(p));
    });
  }
}

struct RmsNormKernels : OperatorKernels {
  template <class T, class>
  static auto extra_args(const KernelArgs& args) {
    return std::tuple(SumsOfRows<compute_t<T>, 1>(args), bias_of<T>(args));
  }
  template <class T, class, int kPacks, class Access>
  static auto held() {
    return rms_norm_kernel<T, kPacks, Access>;
  }
  template <class T, class>
  static auto any_width() {
    return rms_norm_any_width_kernel<T>;
  }
};

}  // namespace

void launch_rms_norm(const KernelArgs& args, const Device& device, Stream stream) {
  launch_forward<RmsNormKernels>(args, device, stream);
}

}  // namespace normops::cuda
