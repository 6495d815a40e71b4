// The table of launch configurations, which assigns the parts of a row to threads. It depends on the width of a row and
// the device, never on the number of rows, so that results are batch-invariant.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace normops::cuda {

// A row is held in registers, in packs of 16 bytes. For coalesced accesses, pack p of a thread is the row's pack
//   (p * blocks of the cluster + block) * threads + thread.
struct RowConfig {
  int64_t packs_of_row;  // the maximum number of packs of a row
  int packs;             // of a thread: 1, 2, 4 or 16, a template argument of the kernels; 0: the row is read twice
  int threads;           // of a row, in each block: a power of two
  int cluster;           // blocks that share a row
};

// The number of threads of a block if a row has at most a warp, so that several rows share the block.
constexpr int kBlockThreads = 128;

// For rows of any width, which are read twice.
constexpr RowConfig kAnyWidth = {INT64_MAX, 0, 512, 1};

// Forward and backward share it, so that both sum a row in the same order. As few threads as possible share a row: up
// to 2 KiB at most a warp, whose sums need no barrier. In wider rows, a thread has 4 packs: enough to saturate memory,
// with registers left for the backward's sums of grad_weight. These take 128 registers, hence blocks of at most 512
// threads. A cluster of blocks shares wider rows. The widest take 16 packs, which for two tensors are 128 registers,
// hence 256 threads. A cluster of 16 has a part of the GPU to itself, and not every GPU has room for it.
constexpr RowConfig kConfigs[] = {
    {8, 1, 8, 1},      {16, 1, 16, 1},     {32, 1, 32, 1},      {64, 2, 32, 1},       {128, 4, 32, 1},
    {256, 4, 64, 1},   {512, 4, 128, 1},   {1024, 4, 256, 1},   {2048, 4, 512, 1},    {4096, 4, 512, 2},
    {8192, 4, 512, 4}, {16384, 4, 512, 8}, {32768, 16, 256, 8}, {65536, 16, 256, 16},
};
// For the widest rows that are held in registers without clusters.
constexpr RowConfig kWidestWithoutClusters = {4096, 16, 256, 1};

// Returns whether a row has at most a warp, or at most a block. The number of packs of a thread determines this at
// compile time, so that kernels leave out unneeded barriers.
constexpr bool within_warp(int packs) { return packs == 1 || packs == 2; }
constexpr bool within_block(int packs) { return within_warp(packs) || packs == 0; }

// Returns the number of rows that a thread of a forward has in flight: several if one does not saturate memory.
constexpr int rows_in_flight(int packs) { return packs == 1 ? 4 : packs == 2 ? 2 : 1; }

constexpr int max_threads(int packs) { return packs <= 2 ? kBlockThreads : packs == 4 ? 512 : 256; }

// Returns how many blocks a multiprocessor needs room for. By default, the compiler aims for more, and spills.
constexpr int min_blocks(int packs) { return packs <= 2 ? 4 : packs == 4 ? 2 : 1; }
constexpr int backward_min_blocks(int packs) { return packs <= 2 ? 4 : 1; }

// The maximum memory of all partial sums of grad_weight, for rows of any width. A single sum may exceed it.
constexpr int64_t kPartialsBytes = int64_t{64} << 20;

// With 16 packs, the backward's sums of grad_weight are in shared memory: 128 KiB for 256 threads.
constexpr bool sums_in_shared(int packs) { return packs == 16; }

constexpr const RowConfig& row_config(int64_t packs_of_row, const Device& device) {
  for (const RowConfig& config : kConfigs) {
    if (packs_of_row <= config.packs_of_row && config.cluster <= device.cluster) return config;
  }
  const bool held = device.cluster == 1 && packs_of_row <= kWidestWithoutClusters.packs_of_row;
  return held ? kWidestWithoutClusters : kAnyWidth;
}

inline const RowConfig& backward_config(int64_t packs_of_row, int64_t pack_elements, int64_t compute_bytes,
                                        const Device& device) {
  const RowConfig& config = row_config(packs_of_row, device);
  constexpr int64_t kOtherBytes = 4096;  // upper bound of what the kernel declares for the sums of rows
  const int64_t sums_bytes = kOtherBytes + config.packs * config.threads * pack_elements * compute_bytes;
  return sums_in_shared(config.packs) && sums_bytes > device.shared_bytes ? kAnyWidth : config;
}

// gated_rms_norm and its backward hold up to twice as much for a row, and compute more. So twice as many blocks of half
// the threads share rows of more than 16 KiB, and no thread has 16 packs. Both sum a row in the same order.
constexpr int kMostGatedPacks = 4;

constexpr int gated_threads(int packs) { return packs <= 2 ? kBlockThreads : 256; }
constexpr int gated_min_blocks(int packs) { return packs <= 2 ? 4 : 2; }
constexpr int gated_backward_min_blocks(int packs) { return packs <= 2 ? 2 : 1; }

constexpr RowConfig gated_config(int64_t packs_of_row, const Device& device) {
  RowConfig config = row_config(packs_of_row, device);
  if (config.packs == 0 || config.packs > kMostGatedPacks) return kAnyWidth;
  while (config.threads > gated_threads(config.packs)) {
    config.threads /= 2;
    config.cluster *= 2;
  }
  return config.cluster <= device.cluster ? config : kAnyWidth;
}

// rms_norm_rope and its backward hold rows in slots of two packs, with the limits of gated operators. A thread has at
// least one slot, so half as many threads share a narrow row. Both sum a row in the same order.
constexpr bool is_rope_packs(int packs) { return packs == 2 || packs == 4; }

constexpr RowConfig rope_config(int64_t slots_of_row, const Device& device) {
  RowConfig config = gated_config(2 * slots_of_row, device);
  if (config.packs == 1) {
    config.packs = 2;
    config.threads /= 2;
  }
  return config;
}

}  // namespace normops::cuda
