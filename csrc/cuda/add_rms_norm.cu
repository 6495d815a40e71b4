// add_rms_norm: h = alpha * x + residual, y = h * rstd * w
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// The sum, rounded to R, which is what is written and normalized.
template <class T, class R, class Access>
struct Addition {
  typename Access::template Rows<const R> residual;
  typename Access::template Rows<R> residual_out;
  // One of them is alpha, the other 1.
  compute_t<R> rounded_factor;  // of a product that is rounded by itself
  compute_t<R> fused_factor;

  bool is_plain() const { return residual.is_plain() && residual_out.is_plain(); }
  template <class Other>
  Addition<T, R, Other> as() const {
    return {typename Other::template Rows<const R>(residual), typename Other::template Rows<R>(residual_out),
            rounded_factor, fused_factor};
  }

  // Called before sum().
  template <int kPacks>
  __device__ void round_products(Elements<T, kPack<R>> (&x)[kPacks]) const {
    if (rounded_factor == 1) return;
    compiler_barrier();  // see cast()
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

template <class T, class R>
Addition<T, R, General> addition_of(const KernelArgs& args) {
  const auto alpha = static_cast<compute_t<R>>(args.alpha);
  const bool rounds = args.casting.multiplied;
  return {rows_of<const R, R>(args[kResidual], args.cols), rows_of<R, R>(args[kResidualOut], args.cols),
          rounds ? alpha : 1, rounds ? 1 : alpha};
}

// Rows that fit into registers: each element is read once.
template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    add_rms_norm_kernel(const Forward<T, R, Access> args, const Addition<T, R, Access> addition) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<R>, kRows> shared;
  RowSums<compute_t<R>, kRows, kPacks> sum_row(shared);
  const Columns<R, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  pdl_wait(args.starts_early);
  Pack<R> h[kRows][kPacks];
  Elements<T, kPack<R>> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<R>(x[r], args.input, args.input.row(rows.first, rows.further(r)), rows.has(r), columns);
    addition.round_products(x[r]);  // with the other packs in registers, there would be too few for it
    load_packs<R>(h[r], addition.residual, addition.residual.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    R* const target = columns.of_row(addition.residual_out.row(rows.first, rows.further(r)));
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      h[r][p] = addition.sum(x[r][p], h[r][p]);
      if (rows.has(r)) store(addition.residual_out, target, columns.offset(p), columns.count(p), h[r][p]);
      keep_few_registers<kPacks>();
    }
    keep_packed(h[r]);
  }
  normalize_rows(args, args.scale.of_group(block.group, args.cols), rows, columns, h, sum_row);
}

// Rows of any width: the sum is read again where it was written.
template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    add_rms_norm_any_width_kernel(const Forward<T, R, General> args, const Addition<T, R, General> addition) {
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const T* const x = args.input.row(row);
  const R* const residual = addition.residual.row(row);
  R* const h = addition.residual_out.row(row);
  const auto add = [&](int64_t column, int64_t count) {
    Elements<T, kPack<R>> x_pack[1] = {load<kPack<R>>(args.input, x, column, count)};
    const Pack<R> residual_pack = load<kPack<R>>(addition.residual, residual, column, count);
    addition.round_products(x_pack);
    const Pack<R> sum = addition.sum(x_pack[0], residual_pack);
    store(addition.residual_out, h, column, count, sum);
    return sum;
  };
  const auto load_sum = [&](int64_t column, int64_t count) {
    return load<kPack<R>>(addition.residual_out, h, column, count);
  };
  normalize_any_width(args, Columns<R, int64_t>(args.cols), add, load_sum);
}

struct AddRmsNormKernels : OperatorKernels {
  template <class Visit>
  static void dispatch_types(const KernelArgs& args, Visit visit) {
    dispatch_pair(args[kInput].dtype, args.dtype(), visit);
  }
  template <class T, class R>
  static auto own(const KernelArgs& args) {
    return addition_of<T, R>(args);
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
