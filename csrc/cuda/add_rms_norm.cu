// add_rms_norm: adds a residual before it normalizes.
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// Computes the sum, rounded to R, which is written and normalized.
template <class T, class R>
struct Addition {
  // One of the factors is alpha, the other 1.
  compute_t<R> rounded_factor;  // the product is rounded before the sum
  compute_t<R> fused_factor;

  // Called before sum().
  template <int kPacks>
  __device__ void round_products(Elements<T, kPack<R>> (&x)[kPacks]) const {
    if (rounded_factor == 1) return;
    compiler_barrier();  // see round_if()
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      Numbers<R> product = to_compute<R>(x[p]);
#pragma unroll
      for (int i = 0; i < kPack<R>; i++) product.element[i] *= rounded_factor;
      x[p] = from_compute<T>(product);
    }
  }

  __device__ Pack<R> sum(const Elements<T, kPack<R>>& x_pack, const Pack<R>& residual_pack) const {
    Numbers<R> h = to_compute<R>(x_pack);
    const Numbers<R> r = to_compute<R>(residual_pack);
#pragma unroll
    for (int i = 0; i < kPack<R>; i++) h.element[i] = fma_rn(fused_factor, h.element[i], r.element[i]);
    return from_compute<R>(h);
  }
};

// residual_out = alpha * input + residual
// output = residual_out * rsqrt(mean(residual_out^2) + eps) * (weight + weight_offset)
// For rows that fit into registers: each element is read once.
template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    add_rms_norm_kernel(const NormArgs<R> args, const RowsOf<const T> input, const RowsOf<T> output,
                        const RowsOf<const R> residual, const RowsOf<R> residual_out, const Addition<T, R> addition) {
  const auto& input_rows = view<Access>(input);
  const auto& residual_rows = view<Access>(residual);
  const auto& residual_out_rows = view<Access>(residual_out);
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<R>, kRows> shared;
  RowSums<compute_t<R>, kRows, kPacks> sum_row(shared);
  const Columns<R, int> columns(args.cols);
  const TakenRows rows(args.rows, group_count<Access>(args), kRows);
  pdl_wait(args.pdl);
  Pack<R> h[kRows][kPacks];
  Elements<T, kPack<R>> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<R>(x[r], input_rows, input_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
    addition.round_products(x[r]);  // before the other packs occupy the registers that it needs
    load_packs<R>(h[r], residual_rows, residual_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    R* const target = columns.of_row(residual_out_rows.row(rows.first, rows.row_offset(r)));
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      h[r][p] = addition.sum(x[r][p], h[r][p]);
      if (rows.has(r)) store(residual_out_rows, target, columns.offset(p), columns.count(p), h[r][p]);
      keep_few_registers<kPacks>();
    }
    keep_packed(h[r]);
  }
  normalize_rows<Access>(args, output, rows, columns, h, sum_row);
}

// The same for rows of any width: the second pass reads residual_out.
template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    add_rms_norm_any_width_kernel(const NormArgs<R> args, const RowsOf<const T> input, const RowsOf<T> output,
                                  const RowsOf<const R> residual, const RowsOf<R> residual_out,
                                  const Addition<T, R> addition) {
  const int64_t row = BlockRows(args.groups, 1).first;
  const T* const x = input.row(row);
  const R* const r = residual.row(row);
  R* const h = residual_out.row(row);
  const auto add = [&](int64_t column, int64_t count) {
    Elements<T, kPack<R>> x_pack[1] = {load<kPack<R>>(input, x, column, count)};
    const Pack<R> residual_pack = load<kPack<R>>(residual, r, column, count);
    addition.round_products(x_pack);
    const Pack<R> sum = addition.sum(x_pack[0], residual_pack);
    store(residual_out, h, column, count, sum);
    return sum;
  };
  const auto load_sum = [&](int64_t column, int64_t count) { return load<kPack<R>>(residual_out, h, column, count); };
  normalize_any_width(args, output, Columns<R, int64_t>(args.cols), add, load_sum);
}

struct AddRmsNormKernels : OperatorKernels {
  template <class Visit>
  static void dispatch_types(const KernelArgs& args, Visit visit) {
    dispatch_pair(args[kInput].dtype, args.dtype(), visit);
  }
  template <class T, class R>
  static auto extra_args(const KernelArgs& args) {
    const auto alpha = static_cast<compute_t<R>>(args.alpha);
    const bool rounds = args.rounding.multiplied;
    return std::tuple(rows_of<const R, R>(args[kResidual], args.cols), rows_of<R, R>(args[kResidualOut], args.cols),
                      Addition<T, R>{rounds ? alpha : 1, rounds ? 1 : alpha});
  }
  template <class T, class R, int kPacks, class Access>
  static auto held() {
    return add_rms_norm_kernel<T, R, kPacks, Access>;
  }
  template <class T, class R>
  static auto any_width() {
    return add_rms_norm_any_width_kernel<T, R>;
  }
};

}  // namespace

void launch_add_rms_norm(const KernelArgs& args, const Device& device, Stream stream) {
  launch_forward<AddRmsNormKernels>(args, device, stream);
}

}  // namespace normops::cuda
