// Sums over the threads that hold a row, in an order that depends on their number alone.
#pragma once
#include "platform.cuh"

namespace normops::cuda {

// Folds the elements of an array in halves.
template <class Number, int kCount>
__device__ Number fold(const Number (&numbers)[kCount]) {
  if constexpr (kCount == 1) {
    return numbers[0];
  } else {
    Number halves[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) halves[i] = numbers[i] + numbers[i + kCount / 2];
    return fold(halves);
  }
}

// Over `width` neighbouring lanes of a warp, a power of two; every one of them gets the sum.
template <class Number, int kCount>
__device__ void sum_lanes(Number (&sums)[kCount], unsigned width) {
  for (unsigned distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
  }
}

// The memory of sum_row: two sets, used in turns, so that a sum need not wait until all have read the one before it.
template <class Number, int kCount>
struct RowSumShared {
  Number warps[2][kWarp][kCount];
  Number blocks[2][kCount];
};

// Over the threads of a row: blockDim.x of them in each block of the cluster; with more than a warp of them, the block
// has no other row. All threads of the block call it alike; `turn` is 0, 1, 0, 1... from call to call.
template <class Number, int kCount>
__device__ void sum_row(Number (&sums)[kCount], RowSumShared<Number, kCount>& shared, unsigned turn) {
  if (blockDim.x <= kWarp) {
    sum_lanes(sums, blockDim.x);
    return;
  }
  sum_lanes(sums, kWarp);
  const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i++) shared.warps[turn][threadIdx.x / kWarp][i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; i++) sums[i] = lane < warps ? shared.warps[turn][lane][i] : Number(0);
  sum_lanes(sums, kWarp);

  const unsigned blocks = cluster_blocks();
  if (blocks == 1) return;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i++) shared.blocks[turn][i] = sums[i];
  }
  cluster_sync();
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    sums[i] = 0;
    for (unsigned rank = 0; rank < blocks; rank++) sums[i] += *in_block_of_cluster(&shared.blocks[turn][i], rank);
  }
}

// To be called before a block ends that summed rows: others of its cluster may still read its memory.
__device__ inline void end_row_sums() {
  if (cluster_blocks() > 1) cluster_end();
}

}  // namespace normops::cuda
