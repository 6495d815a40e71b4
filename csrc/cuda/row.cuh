// Shared code of the forward and backward kernels: the rows and packs of a thread, and rstd.
#pragma once
#include "access.cuh"
#include "launch_config.h"
#include "reduce.cuh"

namespace normops::cuda {

// The columns of a thread's packs. Index is as wide as the row needs: 32 bits take fewer registers. Operators that
// process several packs together have other classes with the same functions.
template <class T, class Index>
struct Columns {
  static constexpr int kTogether = 1;  // packs that are processed together

  Index cols;
  Index first = static_cast<Index>((cluster_rank() * blockDim.x + threadIdx.x) * kPack<T>);
  Index step = static_cast<Index>(cluster_blocks() * blockDim.x * kPack<T>);

  __device__ explicit Columns(int64_t cols) : cols(static_cast<Index>(cols)) {
    make_opaque(step);  // so that it is computed only once
  }
  __device__ Index column(Index pack) const { return first + pack * step; }
  // Returns the offset of a pack from of_row().
  __device__ Index offset(Index pack) const { return pack * step; }
  // Returns the number of elements of the pack that are inside the row: 0 or less if it is beyond the row's end.
  __device__ Index count(Index pack) const { return cols - column(pack); }
  // Returns whether this pack of the thread, or a later one, is inside the row.
  __device__ bool reaches(Index pack) const { return count(pack) > 0; }
  // Returns whether the column of the pack's element i, inside the row or beyond it, is in no other pack.
  __device__ bool owns(Index, int) const { return true; }
  // Returns whether the thread has the row's first column: exactly one thread has it.
  __device__ bool has_first() const { return first == 0; }
  __device__ void take_none() { cols = 0; }

  // Returns the address of the thread's first element in a row, computed only once.
  template <class W>
  __device__ W* of_row(W* row) const {
    W* place = row + first;
    make_opaque(place);
    return place;
  }
};

// The first of the rows that a block takes. All rows of a block belong to one group, so they are `groups` rows apart.
// `groups` consecutive blocks take adjacent rows.
struct BlockRows {
  int64_t group;
  int64_t first;

  // A block takes `rows_at_once` rows of its group at once.
  __device__ BlockRows(int64_t groups, unsigned rows_at_once) : group(0) {
    int64_t turn = blockIdx.x;
    if (groups > 1) {
      group = blockIdx.x % static_cast<unsigned>(groups);
      turn = blockIdx.x / static_cast<unsigned>(groups) * groups;
    }
    first = turn * rows_at_once + group;
  }
};

// The `count` rows that a thread has a part of, among those that its block takes.
struct TakenRows {
  int64_t group;
  int64_t first;
  int64_t left;  // rows in the tensor, from the first one on
  int64_t step;

  __device__ TakenRows(int64_t rows, int64_t groups, int count) {
    const BlockRows block(groups, count * blockDim.y);
    group = block.group;
    first = block.first + threadIdx.y * groups;
    left = rows - first;
    step = blockDim.y * groups;
  }
  __device__ int64_t row_offset(int r) const { return r * step; }
  __device__ bool has(int r) const { return row_offset(r) < left; }
};

// Called between the packs of a thread, so that values loaded for one pack do not occupy registers while others are
// processed.
template <int kPacks>
__device__ void keep_few_registers() {
  if (kPacks == 4) compiler_barrier();
  if (kPacks == 16) keep_order_of_warp();
}

// Loads a thread's packs of a row, or zeros if `is_row` is false. Branches before all loads, so that the loads follow
// one another.
template <class R, class Rows, class T, int kPacks, class Columns>
__device__ void load_packs(Elements<T, kPack<R>> (&packs)[kPacks], const Rows& rows, const T* row, bool is_row,
                           const Columns& columns) {
  const T* const place = columns.of_row(row);
  if (rows.aligned) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      packs[p] = load_elements<T, kPack<R>>(place + columns.offset(p), is_row ? columns.count(p) : 0, true);
    }
  } else if (!is_row) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) packs[p] = {};
  } else {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      packs[p] = load_elements<T, kPack<R>>(place + columns.offset(p), columns.count(p), false);
      if (kPacks == 16) keep_few_registers<kPacks>();  // elements that are loaded one by one take a register each
    }
  }
}

// Called between two passes over packs: makes the compiler convert 16-bit elements again in the second pass, as they
// take half the registers of the converted numbers.
template <class T, int kCount, int kPacks>
__device__ void keep_packed(Elements<T, kCount> (&packs)[kPacks]) {
  if constexpr (Elements<T, kCount>::kPairs) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
#pragma unroll
      for (int i = 0; i < Elements<T, kCount>::kWords; i++) make_opaque(packs[p].words[i]);
    }
  }
}

// Does nothing for packs that are only loaded in the second pass.
template <class Nothing, int kPacks>
__device__ void keep_packed(Nothing (&)[kPacks]) {}

// Rows that are read twice are summed in float32 over this many packs of a thread. These sums are added in float64.
constexpr int kPacksOfChain = 4;

// rstd = 1 / sqrt(mean(x^2) + eps). Forward and backward compute it from the same sums, hence with the same bits, if
// both hold the row. backward_config() determines when the backward cannot.
__device__ inline float rstd_of(float square_sum, double inverse_cols, double eps) {
  return __frsqrt_rn(static_cast<float>(square_sum * inverse_cols + eps));
}

__device__ inline double rstd_of(double square_sum, double inverse_cols, double eps) {
  return 1 / sqrt(square_sum * inverse_cols + eps);
}

// The number of chains of additions of a thread: element i of a pack is added to chain i % kChains.
template <class T>
constexpr int kChains = kPack<T> < 4 ? kPack<T> : 4;

// chains += x^2, for each x of a pack, of elements or of numbers.
template <class T, class Values>
__device__ void add_squares(const Values& values, compute_t<T> (&chains)[kChains<T>]) {
  const Numbers<T> x = to_compute<T>(values);
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) {
    compute_t<T>& chain = chains[i % kChains<T>];
    chain = fma_rn(x.element[i], x.element[i], chain);
  }
}

// Returns the number of blocks for `rows` rows, if each takes `rows_at_once` rows of one group.
constexpr int64_t blocks_of_rows(int64_t rows, int64_t rows_at_once, int64_t groups) {
  return (rows / groups + rows_at_once - 1) / rows_at_once * groups;
}

// Rows of at most a warp share a block, along its y dimension. Wider rows have a block each, see RowSums.
inline dim3 block_of(const RowConfig& config) {
  const unsigned threads = config.threads;
  return dim3(threads, threads <= kWarp ? kBlockThreads / threads : 1);
}

// Calls launch.template operator()<kPacks>() with the configuration's packs, for rows of T; 0 is any width.
template <class T, class Launch>
void dispatch_packs(int packs, Launch launch) {
  if constexpr (kIsHeld<T>) {
    switch (packs) {
      case 1:
        return launch.template operator()<1>();
      case 2:
        return launch.template operator()<2>();
      case 4:
        return launch.template operator()<4>();
      case 16:
        return launch.template operator()<16>();
    }
  }
  launch.template operator()<0>();
}

}  // namespace normops::cuda
