// A cluster: the blocks that hold one row, which are those along y. Without clusters every block is one of its own.
// Blocks send each other numbers, and each waits for those that it expects: a barrier of the cluster would wait for all
// memory of the GPU.
#pragma once
#include "platform.cuh"

namespace normops::cuda {

constexpr int kMostBlocksOfCluster = 16;

__device__ inline unsigned cluster_blocks() { return gridDim.y; }
__device__ inline unsigned cluster_rank() { return blockIdx.y; }

// Before it, other blocks of the cluster may not run yet. In between, there is time for something else.
__device__ inline void arrive_at_cluster() {
#if NORMOPS_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_for_cluster() {
#if defined(NORMOPS_CUDA_EMULATION)
  cluster_barrier();
#elif NORMOPS_CLUSTERS
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

#if !defined(NORMOPS_CUDA_EMULATION)

// Counts the bytes that come into this block's shared memory, where it has to lie itself (an mbarrier). It is used time
// after time: a time is over when all that was expected has come.
class Arrivals {
 public:
  // By one thread, before the block arrives at the cluster.
  __device__ void begin() {
#if NORMOPS_CLUSTERS
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(this)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // By one thread, once each time; some of it may have come before.
  __device__ void expect(unsigned bytes) {
#if NORMOPS_CLUSTERS
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(this)), "r"(bytes)
                 : "memory");
#endif
  }

  // The number `time`, counted from 0. Thereafter what has come can be read: acquire.cta, the default, is enough, as in
  // CUTLASS, since it came into this block's own memory, and is counted there.
  __device__ void wait(unsigned time) {
#if NORMOPS_CLUSTERS
    unsigned is_over;
    do {
      asm volatile(
          "{\n\t.reg .pred over;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, over;\n\t}"
          : "=r"(is_over)
          : "r"(address_of(this)), "r"(time % 2)
          : "memory");
    } while (is_over == 0);
#endif
  }

  // Puts `bits` where the block `rank` has what this block has at `place`, and tells its arrivals, as which these are.
  __device__ void send(unsigned rank, uint32_t* place, uint32_t bits) const {
#if NORMOPS_CLUSTERS
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(in(rank, place)),
                 "r"(bits), "r"(in(rank, this))
                 : "memory");
#endif
  }

  __device__ void send(unsigned rank, uint64_t* place, uint64_t bits) const {
#if NORMOPS_CLUSTERS
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(in(rank, place)),
                 "l"(bits), "r"(in(rank, this))
                 : "memory");
#endif
  }

 private:
  static __device__ unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }

#if NORMOPS_CLUSTERS
  // The address of what the block `rank` has there.
  static __device__ unsigned in(unsigned rank, const void* shared) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address_of(shared)), "r"(rank));
    return address;
  }
#endif

  uint64_t barrier_;
};

#endif

}  // namespace normops::cuda
