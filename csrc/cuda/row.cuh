// What the kernels of forward and backward have in common: which rows and packs a thread has, and rstd.
#pragma once
#include "access.cuh"
#include "launch_config.h"
#include "reduce.cuh"

namespace normops::cuda {

// The columns of a thread's packs. Index is as wide as the row needs: 32 bits take fewer registers. Operators that deal
// with several packs at once have others, with functions of the same names.
template <class T, class Index>
struct Columns {
  static constexpr int kTogether = 1;  // packs

  Index cols;
  Index first = static_cast<Index>((cluster_rank() * blockDim.x + threadIdx.x) * kPack<T>);
  Index step = static_cast<Index>(cluster_blocks() * blockDim.x * kPack<T>);

  __device__ explicit Columns(int64_t cols) : cols(static_cast<Index>(cols)) {
    make_opaque(step);  // so that it is computed only once
  }
  __device__ Index column(Index pack) const { return first + pack * step; }
  // How far a pack is from of_row().
  __device__ Index offset(Index pack) const { return pack * step; }
  // How many elements of the pack are inside the row: 0 or less if it is behind the row's end.
  __device__ Index count(Index pack) const { return cols - column(pack); }
  // Whether this pack of the thread, or one after it, is inside the row.
  __device__ bool reaches(Index pack) const { return count(pack) > 0; }
  // Whether no other pack has what would be the column of the pack's element i, inside the row or behind it.
  __device__ bool owns(Index, int) const { return true; }
  // Whether the thread has the row's first column: one thread has it.
  __device__ bool has_first() const { return first == 0; }
  __device__ void take_none() { cols = 0; }

  // The address of the first of the thread's elements in a row, computed only once.
  template <class W>
  __device__ W* of_row(W* row) const {
    W* place = row + first;
    make_opaque(place);
    return place;
  }
};

// The first of the rows that a block takes. All rows of a block are of one group, so they lie `groups` rows apart. As
// many blocks as there are groups take rows beside each other.
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

// Among the rows that a block takes, those that a thread has a part of: `count` of them.
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

// Called between the packs of a thread, so that what is loaded for one pack does not wait in registers while others are
// dealt with.
template <int kPacks>
__device__ void keep_few_registers() {
  if (kPacks == 4) compiler_barrier();
  if (kPacks == 16) keep_order_of_warp();
}

// Loads a thread's packs of a row, or zeros if there is no such row. That, and `aligned`, are asked before all loads,
// so that the loads follow one another.
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
// take half the registers that the numbers made of them would take.
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

// For packs that are only loaded in the second pass: nothing to do.
template <class Nothing, int kPacks>
__device__ void keep_packed(Nothing (&)[kPacks]) {}

// Rows that are read twice are summed in float32 over this many packs of a thread, and these sums in float64.
constexpr int kPacksOfChain = 4;

// rstd = 1 / sqrt(mean(x^2) + eps). Forward and backward make it of the same sums, so that both see the same bits,
// where both hold the row. backward_config() says where the backward cannot.
__device__ inline float rstd_of(float square_sum, double inverse_cols, double eps) {
  return __frsqrt_rn(static_cast<float>(square_sum * inverse_cols + eps));
}

__device__ inline double rstd_of(double square_sum, double inverse_cols, double eps) {
  return 1 / sqrt(square_sum * inverse_cols + eps);
}

// How many chains of additions a thread has: element i of a pack goes to chain i % kChains.
template <class T>
constexpr int kChains = kPack<T> < 4 ? kPack<T> : 4;

// chains += x^2, for the x of a pack, which is of T or of numbers.
template <class T, class Values>
__device__ void add_squares(const Values& values, compute_t<T> (&chains)[kChains<T>]) {
  const Numbers<T> x = to_compute<T>(values);
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) {
    compute_t<T>& chain = chains[i % kChains<T>];
    chain = fma_rn(x.element[i], x.element[i], chain);
  }
}

// How many blocks there are for `rows` rows, if each takes `rows_at_once` rows of one group.
constexpr int64_t blocks_of_rows(int64_t rows, int64_t rows_at_once, int64_t groups) {
  return (rows / groups + rows_at_once - 1) / rows_at_once * groups;
}

// Rows of at most a warp share a block, along its y dimension; wider ones have it to themselves, see RowSums.
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
