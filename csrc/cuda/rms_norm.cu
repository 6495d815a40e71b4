// rms_norm: y = x * rstd * w. The sum of the squares of each row may be given, or be all that is wanted: kernels with
// general access ask.
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

template <class T, class Access>
struct SumsAndBias {
  typename Access::template Sums<compute_t<T>, 1> sums;
  typename Access::template Bias<T> bias;

  bool is_plain() const { return sums.is_plain() && bias.is_plain(); }
  template <class Other>
  SumsAndBias<T, Other> as() const {
    return {sums.template as<Other>(), typename Other::template Bias<T>(bias)};
  }
};

// Rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    rms_norm_kernel(const Forward<T, T, Access> args, const SumsAndBias<T, Access> own) {
  const auto& stats = own.sums;
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared, !stats.are(Sums::input));
  const Columns<T, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  pdl_wait(args.starts_early);
  Pack<T> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], args.input, args.input.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  if (stats.are(Sums::output)) {
    compute_t<T> sums[kRows];
    sum_squares<T>(x, sums, sum_row);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.write(columns, sums + r, rows.first, rows.further(r));
    }
    return;
  }
  const auto sum_or_read = [&](compute_t<T>(&sums)[kRows]) {
    if (stats.are(Sums::compute)) return sum_row(sums);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (rows.has(r)) stats.read(sums + r, rows.first, rows.further(r));
    }
  };
  const auto scale = args.scale.of_group(block.group, args.cols);
  if constexpr (std::is_same_v<Access, General>) {
    normalize_rows(args, scale, rows, columns, x, sum_or_read, [&](Numbers<T>(&y)[1], int r, int p) {
      own.bias.add(y[0], rows.first, rows.further(r), columns.column(p), rows.has(r) ? columns.count(p) : 0);
    });
  } else {
    normalize_rows(args, scale, rows, columns, x, sum_or_read);
  }
}

// Rows of any width: read twice, the second time from the L2 cache as far as it holds them.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_any_width_kernel(const Forward<T, T, General> args, const SumsAndBias<T, General> own) {
  const auto& stats = own.sums;
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const Columns<T, int64_t> columns(args.cols);
  const T* const x = args.input.row(row);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(args.input, x, column, count); };
  pdl_wait(args.starts_early);
  compute_t<T> sum;
  if (stats.are(Sums::input)) {
    stats.read(&sum, row);
  } else {
    sum = square_sum_of_any_width<T>(columns, load_pack);
  }
  if (stats.are(Sums::output)) {
    stats.write(columns, &sum, row);
  } else {
    normalize_summed(args, columns, sum, load_pack, [&](Numbers<T>(&y)[1], int64_t p) {
      own.bias.add(y[0], row, 0, columns.column(p), columns.count(p));
    });
  }
}

struct RmsNormKernels : OperatorKernels {
  template <class T, class>
  static SumsAndBias<T, General> own(const KernelArgs& args) {
    return {SumsOfRows<compute_t<T>, 1>(args), bias_of<T>(args)};
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
