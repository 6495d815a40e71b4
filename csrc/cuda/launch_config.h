// Which threads hold which part of a row: the one table of launch configurations. It depends on the width of a row and
// the device, never on the number of rows, so that a row's arithmetic does not either.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace normops::cuda {

// A row is held in registers, in packs of 16 bytes: pack p of a thread is the row's pack
// (p * blocks of the cluster + block) * threads + thread, so that neighbouring threads access neighbouring packs.
struct RowConfig {
  int64_t packs_of_row;  // the most packs that a row may have
  int packs;             // of a thread: 1, 2, 4 or 16, a template argument of the kernels; 0: the row is read twice
  int threads;           // of a row, in each block: a power of two
  int cluster;           // blocks that share a row
};

// How many threads a block has if a row has at most a warp, so that several rows share the block.
constexpr int kBlockThreads = 128;

// For rows of any width, which are read twice.
constexpr RowConfig kAnyWidth = {INT64_MAX, 0, 512, 1};

// For forward and backward alike, so that both sum a row in the same order. As few threads as possible share a row: up
// to 2 KiB it is at most a warp, whose sums need no barrier. Beyond that a thread has 4 packs, which is enough to keep
// memory busy and leaves the backward registers for its sums of grad_weight: 128 registers, hence blocks of at most 512
// threads. Wider rows are shared by a cluster of blocks. The widest take 16 packs, which with two tensors are 128
// registers, hence 256 threads. A cluster of 16 has a part of the GPU to itself, and not every GPU has room for it.
constexpr RowConfig kConfigs[] = {
    {8, 1, 8, 1},      {16, 1, 16, 1},     {32, 1, 32, 1},      {64, 2, 32, 1},       {128, 4, 32, 1},
    {256, 4, 64, 1},   {512, 4, 128, 1},   {1024, 4, 256, 1},   {2048, 4, 512, 1},    {4096, 4, 512, 2},
    {8192, 4, 512, 4}, {16384, 4, 512, 8}, {32768, 16, 256, 8}, {65536, 16, 256, 16},
};
// For the widest rows that are held where there are no clusters.
constexpr RowConfig kWidestWithoutClusters = {4096, 16, 256, 1};

// Whether a row has at most a warp, or at most a block, as its number of packs to a thread tells. What it need not wait
// for is then left out of the code.
constexpr bool within_warp(int packs) { return packs == 1 || packs == 2; }
constexpr bool within_block(int packs) { return within_warp(packs) || packs == 0; }

// How many rows a thread of a forward has in flight at once: several where a row has too few bytes to keep memory busy.
constexpr int rows_in_flight(int packs) { return packs == 1 ? 4 : packs == 2 ? 2 : 1; }

constexpr int max_threads(int packs) { return packs <= 2 ? kBlockThreads : packs == 4 ? 512 : 256; }

// For how many blocks a multiprocessor should have room. If it is not told, the compiler aims for more, and spills.
constexpr int min_blocks(int packs) { return packs <= 2 ? 4 : packs == 4 ? 2 : 1; }
constexpr int backward_min_blocks(int packs) { return packs <= 2 ? 4 : 1; }

// The most memory that the partial sums of grad_weight take together, for rows of any width; a single one may take
// more.
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
  constexpr int64_t kOtherBytes = 4096;  // at least what the kernel declares for the sums of rows
  const int64_t sums_bytes = kOtherBytes + config.packs * config.threads * pack_elements * compute_bytes;
  return sums_in_shared(config.packs) && sums_bytes > device.shared_bytes ? kAnyWidth : config;
}

// gated_rms_norm and its backward hold up to twice as much of a row, and compute more. So rows of more than 16 KiB are
// shared by twice as many blocks of half the threads, and no thread has 16 packs. Both sum a row in the same order.
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

// rms_norm_rope and its backward hold rows in slots of two packs, and as much of them as those with a gate. A thread
// has at least a slot, so that half as many have a narrow row. Both sum a row in the same order.
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
