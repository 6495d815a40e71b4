// A cluster is the blocks along y, which hold one row together. Without clusters, every block is a cluster. Blocks send
// each other numbers, and each block waits for those that it expects. A cluster barrier would be slower, as it waits
// for all accesses to global memory.
#pragma once
#include "platform.cuh"

namespace normops::cuda {

constexpr int kMostBlocksOfCluster = 16;

__device__ inline unsigned cluster_blocks() { return gridDim.y; }
__device__ inline unsigned cluster_rank() { return blockIdx.y; }

// arrive_at_cluster() and wait_for_cluster() are a split barrier, with other work between them. Before it, other blocks
// of the cluster may not have started.
__device__ inline void arrive_at_cluster() {
#if NORMOPS_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_for_cluster() {
#if NORMOPS_CLUSTERS
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// An mbarrier in a block's shared memory, which counts the bytes that other blocks send there. It is reused: a phase
// ends when all expected bytes have arrived.
class Mbarrier {
 public:
  // Called by one thread, before the block arrives at the cluster.
  __device__ void begin() {
#if NORMOPS_CLUSTERS
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(this)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Called by one thread, once in each phase. Some of the bytes may have arrived before.
  __device__ void expect(unsigned bytes) {
#if NORMOPS_CLUSTERS
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(this)), "r"(bytes)
                 : "memory");
#endif
  }

  // Waits for the end of phase `time`, counted from 0. The bytes can then be read: acquire.cta, the default, is enough,
  // as in CUTLASS, since the bytes arrive in this block's memory and are counted there.
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

  // Writes `bits` to the shared memory of block `rank`, at the offset that `place` has in this block's. The Mbarrier of
  // that block, at the same offset as this one, counts them.
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
  // Returns the address in the shared memory of block `rank` with the offset that `shared` has in this block's.
  static __device__ unsigned in(unsigned rank, const void* shared) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address_of(shared)), "r"(rank));
    return address;
  }
#endif

  uint64_t barrier_;
};

}  // namespace normops::cuda
