// add_rms_norm: h = x + residual, y = h * rstd * w
#include "add_rms_norm_launch.h"
#include "forward_rows.cuh"

namespace normops::cuda {
namespace {

// The sum, rounded to R, which is what is written and normalized.
template <class T, class R>
struct Addition {
  RowsOf<const T> input;
  RowsOf<const R> residual;
  RowsOf<R> residual_out;
};

template <class T, class R>
__device__ Pack<R> sum_of(const Elements<T, kPack<R>>& x_pack, const Pack<R>& residual_pack) {
  Numbers<R> h = to_compute<R>(x_pack);
  const Numbers<R> residual = to_compute<R>(residual_pack);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) h.element[i] += residual.element[i];
  return from_compute<R>(h);
}

// Rows that fit into registers: each element is read once.
template <class T, class R, int kPacks>
__global__ void __launch_bounds__(max_threads(kPacks), min_blocks(kPacks))
    add_rms_norm_kernel(const Forward<T, R> args, const Addition<T, R> addition) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<R>, kRows> shared;
  const Columns<R, int> columns(args.cols);
  Pack<R> h[kRows][kPacks];
  Elements<T, kPack<R>> x[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int64_t row = first_row_of_thread<kRows>() + r * blockDim.y;
    const bool is_row = row < args.rows;
    load_packs(x[r], addition.input, is_row ? addition.input.row(row) : nullptr, columns);
    load_packs(h[r], addition.residual, is_row ? addition.residual.row(row) : nullptr, columns);
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int64_t row = first_row_of_thread<kRows>() + r * blockDim.y;
    R* const target = row < args.rows ? addition.residual_out.row(row) : nullptr;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      h[r][p] = sum_of<T, R>(x[r][p], h[r][p]);
      if (target != nullptr) addition.residual_out.store(target, columns.column(p), columns.count(p), h[r][p]);
      keep_few_registers<kPacks>();
    }
    keep_packed(h[r]);
  }
  normalize_rows(args, columns, h, shared);
}

// Rows of any width: the sum is read again where it was written.
template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads)
    add_rms_norm_any_width_kernel(const Forward<T, R> args, const Addition<T, R> addition) {
  const T* const x = addition.input.row(blockIdx.x);
  const R* const residual = addition.residual.row(blockIdx.x);
  R* const h = addition.residual_out.row(blockIdx.x);
  const auto add = [&](int64_t column, int64_t count) {
    const Pack<R> sum = sum_of<T, R>(addition.input.template load<kPack<R>>(x, column, count),
                                     addition.residual.template load<kPack<R>>(residual, column, count));
    addition.residual_out.store(h, column, count, sum);
    return sum;
  };
  const auto load = [&](int64_t column, int64_t count) {
    return addition.residual_out.template load<kPack<R>>(h, column, count);
  };
  normalize_any_width(args, add, load);
}

}  // namespace

void launch_add_rms_norm(const AddRmsNormArgs& args, const Device& device, Stream stream) {
  dispatch_pair(args.dtype, args.residual_dtype, [&]<class T, class R>() {
    const auto forward = forward_of<T, R>(args);
    const Addition<T, R> addition = {rows_of<const T, R>(args.input, args.input_rows, args.cols),
                                     rows_of<const R, R>(args.residual, args.residual_rows, args.cols),
                                     rows_of<R, R>(args.residual_out, args.residual_out_rows, args.cols)};
    dispatch_forward<R>(args.rows, args.cols, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(add_rms_norm_any_width_kernel<T, R>, shape, stream, forward, addition);
      } else {
        launch(add_rms_norm_kernel<T, R, kPacks>, shape, stream, forward, addition);
      }
    });
  });
}

}  // namespace normops::cuda
