// Shared code of the forward kernels: computes outputs of T from rows of R. Each kernel loads these rows, or computes
// them from the rows of the input, which have the type T.
#pragma once
#include "operator_kernels.cuh"

namespace normops::cuda {

// The epilogue of an operator that writes the normalized numbers unchanged.
struct NoEpilogue {
  template <class... Computed>
  __device__ void operator()(const Computed&...) const {}
};

// Returns h * rstd * w, to be passed to an Epilogue or written.
template <class T, class R, class Epilogue, class Values>
__device__ Numbers<R> normalized(const Values& h, compute_t<R> rstd, const Numbers<R>& scale, Rounding rounding) {
  Numbers<R> numbers = to_compute<R>(h);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) numbers.element[i] *= rstd;
  round_if<T>(numbers, rounding.normalized);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) numbers.element[i] *= scale.element[i];
  if constexpr (!std::is_same_v<Epilogue, NoEpilogue>) round_if<T>(numbers, rounding.multiplied);
  return numbers;
}

// Computes the sums of squares of rows in registers. sum_row reduces the sums of the threads.
template <class R, class Values, int kRows, int kPacks, class SumRow>
__device__ void sum_squares(const Values (&h)[kRows][kPacks], compute_t<R> (&sums)[kRows], SumRow& sum_row) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    compute_t<R> chains[kChains<R>] = {};
#pragma unroll
    for (int p = 0; p < kPacks; p++) add_squares<R>(h[r][p], chains);
    sums[r] = fold(chains);
  }
  sum_row(sums);
}

// Normalizes rows in registers: a thread has kPacks packs of each row, as elements or as numbers.
// epilogue(numbers, r, p) modifies the numbers of row r that are written, for the packs processed together from p on.
template <class Access, class T, class R, class Columns, class Values, int kRows, int kPacks, class SumRow,
          class Epilogue = NoEpilogue>
__device__ void normalize_rows(const NormArgs<R>& args, const RowsOf<T>& output, const TakenRows& rows,
                               const Columns& columns, Values (&h)[kRows][kPacks], SumRow& sum_row,
                               Epilogue epilogue = {}) {
  using Compute = compute_t<R>;
  constexpr int kTogether = Columns::kTogether;
  using Scale = GroupScale<R, Access>;
  const Scale scale(args.scale, rows.group, args.cols);
  const auto& target_rows = view<Access>(output);
  typename Scale::Held held[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; p++) held[p] = scale.hold(columns.column(p), columns.count(p));
  Compute rstd[kRows];
  sum_squares<R>(h, rstd, sum_row);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    rstd[r] = rstd_of(rstd[r], args.inverse_cols, args.eps);
    keep_packed(h[r]);
  }
  keep_packed(held);
  T* target[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) target[r] = columns.of_row(target_rows.row(rows.first, rows.row_offset(r)));

#pragma unroll
  for (int p = 0; p < kPacks; p += kTogether) {
    Numbers<R> w[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; t++) {
      w[t] = scale.numbers(held[p + t], columns.column(p + t), columns.count(p + t));
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      Numbers<R> y[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; t++) {
        y[t] = normalized<T, R, Epilogue>(h[r][p + t], rstd[r], w[t], args.rounding);
      }
      epilogue(y, r, p);
#pragma unroll
      for (int t = 0; t < kTogether; t++) {
        const int count = rows.has(r) ? columns.count(p + t) : 0;
        store(target_rows, target[r], columns.offset(p + t), count, from_compute<T>(y[t]));
      }
    }
    keep_few_registers<kPacks>();
  }
}

// Returns the sum of squares of a row of any width, in a block of kAnyWidth. load(column, count) returns a pack of the
// row, or its numbers.
template <class R, class Columns, class Load>
__device__ compute_t<R> square_sum_of_any_width(const Columns& columns, const Load& load) {
  __shared__ RowSumShared<double, 1> shared;
  RowSums<double, 1, kAnyWidth.packs> sum_row(shared);
  double square_sum[1] = {};
  for (int64_t first = 0; columns.reaches(first); first += kPacksOfChain) {
    compute_t<R> chains[kChains<R>] = {};
#pragma unroll
    for (int p = 0; p < kPacksOfChain; p++) {
      add_squares<R>(load(columns.column(first + p), columns.count(first + p)), chains);
    }
    square_sum[0] += fold(chains);
  }
  sum_row(square_sum);
  return static_cast<compute_t<R>>(square_sum[0]);
}

// Normalizes a row of any width from its sum of squares. load is as in square_sum_of_any_width(). epilogue(numbers, p)
// modifies the numbers that are written, for the thread's packs from p on that are processed together.
template <class T, class R, class Columns, class Load, class Epilogue = NoEpilogue>
__device__ void normalize_summed(const NormArgs<R>& args, const RowsOf<T>& output, const Columns& columns,
                                 compute_t<R> square_sum, const Load& load, const Epilogue& epilogue = {}) {
  constexpr int kTogether = Columns::kTogether;
  const compute_t<R> rstd = rstd_of(square_sum, args.inverse_cols, args.eps);
  const BlockRows block(args.groups, 1);
  const GroupScale<R, General> scale(args.scale, block.group, args.cols);
  T* const target = output.row(block.first);
  for (int64_t p = 0; columns.reaches(p); p += kTogether) {
    Numbers<R> y[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; t++) {
      const int64_t column = columns.column(p + t), count = columns.count(p + t);
      y[t] = normalized<T, R, Epilogue>(load(column, count), rstd, scale.numbers({}, column, count), args.rounding);
    }
    epilogue(y, p);
#pragma unroll
    for (int t = 0; t < kTogether; t++) {
      store(output, target, columns.column(p + t), columns.count(p + t), from_compute<T>(y[t]));
    }
  }
}

// Sums and normalizes a row of any width in two passes, with a load function for each.
template <class T, class R, class Columns, class LoadFirst, class LoadAgain, class Epilogue = NoEpilogue>
__device__ void normalize_any_width(const NormArgs<R>& args, const RowsOf<T>& output, const Columns& columns,
                                    LoadFirst load_first, LoadAgain load_again, Epilogue epilogue = {}) {
  pdl_wait(args.pdl);
  normalize_summed(args, output, columns, square_sum_of_any_width<R>(columns, load_first), load_again, epilogue);
}

template <class Kernels>
void launch_forward(const KernelArgs& args, const Device& device, Stream stream) {
  dispatch_kernels<Kernels>(args, device, [&]<class T, class R, int kPacks>(const RowConfig& config) {
    const dim3 block = block_of(config);
    const int64_t rows_at_once = kPacks == 0 ? 1 : static_cast<int64_t>(block.y) * rows_in_flight(kPacks);
    const auto blocks = static_cast<unsigned>(blocks_of_rows(args.rows, rows_at_once, args.weight.groups));
    const LaunchShape shape = {dim3(blocks, config.cluster), block, 0, device.pdl};
    const int64_t or_of_starts = Kernels::or_of_starts(args);
    const std::tuple rows(rows_of<const T, R>(args[kInput], or_of_starts), rows_of<T, R>(args[kOutput], or_of_starts));
    launch_kernel<Kernels, T, R, kPacks>(shape, stream, norm_args_of<R>(args, or_of_starts, device.pdl),
                                         std::tuple_cat(rows, Kernels::template extra_args<T, R>(args)));
  });
}

}  // namespace normops::cuda
