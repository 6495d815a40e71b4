// Kernels that misuse barriers and shuffles, and some that do not, for a test of cuda_emulation.h itself: runs the one
// that is named, prints what it computed, and ends with an exception if the emulation throws one.
#include "cuda_emulation.h"

#include <cstdio>
#include <string_view>

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kThreads = 96, kBlocks = 3;

int result[kBlocks][kThreads];

// Each thread reads what its neighbour in the next warp wrote, and warps shuffle different numbers of times before
// that.
template <bool kBarrier>
void rotate() {
  __shared__ int numbers[kThreads];
  int sum = threadIdx.x % 32;
  for (unsigned i = 0; i <= threadIdx.x / 32; i++) sum = __shfl_xor_sync(kAllLanes, sum, 1u);
  numbers[threadIdx.x] = sum + threadIdx.x / 32 * 100;
  if (kBarrier) __syncthreads();
  result[blockIdx.x][threadIdx.x] = numbers[(threadIdx.x + 32) % kThreads];
}

void read_unwritten() {
  __shared__ int numbers[kThreads];
  int* const dynamic = static_cast<int*>(normops::cuda::emulation::dynamic_shared());
  result[blockIdx.x][threadIdx.x] = numbers[threadIdx.x] & dynamic[threadIdx.x];
  numbers[threadIdx.x] = dynamic[threadIdx.x] = 0;
}

void barrier_of_some() {
  if (threadIdx.x < 32) __syncthreads();
}

void exit_before_barrier() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void shuffle_of_some() {
  if (threadIdx.x % 32 < 4) __shfl_xor_sync(kAllLanes, 1, 1u);
}

void shuffle_or_barrier() {
  if (threadIdx.x % 2 == 0) {
    __shfl_xor_sync(kAllLanes, 1, 2u);
  } else {
    __syncthreads();
  }
}

void two_distances() { __shfl_xor_sync(kAllLanes, 1, 1 + threadIdx.x / 8 % 2); }

void barrier_of_some_blocks() {
  if (blockIdx.y == 1) cluster_barrier();
}

void two_barriers_of_clusters() {
  if (blockIdx.y == 1) {
    cluster_barrier();
  } else {
    cluster_barrier();
  }
}

// A block sends to the other one, which may not have begun, may not wait, or gets less than it expects.
template <bool kBegins, unsigned kExpected>
void send_one() {
  __shared__ normops::cuda::Arrivals arrivals;
  __shared__ uint32_t number;
  if (kBegins && threadIdx.x == 0) arrivals.begin();
  if (kBegins) cluster_barrier();
  if (threadIdx.x == 0) arrivals.send(1 - blockIdx.y, &number, 1u);
  if (kExpected == 0) return;
  if (threadIdx.x == 0) arrivals.expect(kExpected);
  arrivals.wait(0);
}

void part_of_mask() { __shfl_xor_sync(0xffu, 1, 1u); }

}  // namespace

int main(int, char** arguments) {
  const struct {
    std::string_view name;
    void (*kernel)();
    unsigned cluster = 1;
  } kernels[] = {{"rotate", rotate<true>},
                 {"rotate_without_barrier", rotate<false>},
                 {"read_unwritten", read_unwritten},
                 {"barrier_of_some", barrier_of_some},
                 {"exit_before_barrier", exit_before_barrier},
                 {"two_barriers", two_barriers},
                 {"shuffle_of_some", shuffle_of_some},
                 {"shuffle_or_barrier", shuffle_or_barrier},
                 {"two_distances", two_distances},
                 {"part_of_mask", part_of_mask},
                 {"barrier_of_some_blocks", barrier_of_some_blocks, 2},
                 {"two_barriers_of_clusters", two_barriers_of_clusters, 2},
                 {"arrivals_of_nothing", send_one<true, 8>, 2},
                 {"end_before_arrivals", send_one<true, 0>, 2},
                 {"send_before_begin", send_one<false, 4>, 2},
                 {"seventeen_blocks", read_unwritten, 17}};
  for (const auto& [name, kernel, cluster] : kernels) {
    if (name == arguments[1]) {
      normops::cuda::emulation::launch(kernel, dim3(kBlocks, cluster), dim3(kThreads), kThreads * sizeof(int));
    }
  }
  for (const auto& block : result) {
    for (const int number : block) std::printf("%d ", number);
  }
}
