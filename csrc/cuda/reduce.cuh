// Sums over the threads that hold a row, in an order that depends on their number alone.
#pragma once
#include <cstring>
#include <type_traits>

#include "cluster.cuh"
#include "launch_config.h"

namespace normops::cuda {

// Sums the elements of an array, by adding its halves repeatedly.
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

// Sums over `width` neighbouring lanes of a warp, a power of two. Each of these lanes gets the sum.
template <class Number, int kCount>
__device__ void sum_lanes(Number (&sums)[kCount], unsigned width) {
  for (unsigned distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
  }
}

// The shared memory of RowSums, double-buffered, so that a sum need not wait until all threads have read the previous
// one.
template <class Number, int kCount>
struct RowSumShared {
  Number warps[2][kWarp][kCount];
  Number blocks[2][kMostBlocksOfCluster][kCount];
  Mbarrier mbarriers[2];  // count the bytes of `blocks`
};

// Sums over the threads of a row: blockDim.x threads, a power of two, in each block of the cluster. If these are more
// than a warp, the block has only this row. All threads of a block make the same calls, at least one. Each thread has
// kPacks packs of the row, which bounds the number of threads at compile time.
template <class Number, int kCount, int kPacks>
class RowSums {
 public:
  // If not `used`, no other function is called.
  __device__ explicit RowSums(RowSumShared<Number, kCount>& shared, bool used = true) : shared_(shared) {
    if (within_block(kPacks) || cluster_blocks() == 1 || !used) return;
    if (threadIdx.x == 0) {
      for (Mbarrier& mbarrier : shared_.mbarriers) mbarrier.begin();
    }
    arrive_at_cluster();
  }

  __device__ void operator()(Number (&sums)[kCount]) {
    if (within_warp(kPacks) || blockDim.x <= kWarp) return sum_lanes(sums, blockDim.x);
    sum_block(sums);
    if (!within_block(kPacks) && cluster_blocks() > 1) sum_cluster(sums);
    calls_++;
  }

 private:
  __device__ void sum_block(Number (&sums)[kCount]) {
    sum_lanes(sums, kWarp);
    const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    auto& of_warps = shared_.warps[calls_ % 2];
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i++) of_warps[threadIdx.x / kWarp][i] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] = lane < warps ? of_warps[lane][i] : Number(0);
    sum_lanes(sums, kWarp);
  }

  // A block sends its sum before it waits for those of the others. So no block is more than one call ahead of another,
  // and no block ends before all sums sent to it have arrived.
  __device__ void sum_cluster(Number (&sums)[kCount]) {
    const unsigned blocks = cluster_blocks();
    auto& of_blocks = shared_.blocks[calls_ % 2];
    Mbarrier& mbarrier = shared_.mbarriers[calls_ % 2];
    if (calls_ == 0) wait_for_cluster();
    if (threadIdx.x == 0) mbarrier.expect(blocks * sizeof(sums));
    if (threadIdx.x < blocks) {
#pragma unroll
      for (int i = 0; i < kCount; i++) send(mbarrier, threadIdx.x, of_blocks[cluster_rank()][i], sums[i]);
    }
    mbarrier.wait(calls_ / 2);
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] = of_blocks[threadIdx.x & (blocks - 1)][i];
    sum_lanes(sums, blocks);
  }

  static __device__ void send(const Mbarrier& mbarrier, unsigned rank, Number& place, Number number) {
    using Bits = std::conditional_t<sizeof(Number) == 4, uint32_t, uint64_t>;
    Bits bits;
    std::memcpy(&bits, &number, sizeof number);
    mbarrier.send(rank, reinterpret_cast<Bits*>(&place), bits);
  }

  RowSumShared<Number, kCount>& shared_;
  unsigned calls_ = 0;
};

}  // namespace normops::cuda
