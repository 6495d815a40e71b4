// How rows go through the kernels of the CPU: the one table. What it says depends on the instruction set, the type and
// the size of the call, and changes the time that a call takes, but no bit of its result. The ratios are times on a Zen
// 4, one thread, 2026-11-24; docs/notes/cpu.md tells how they were measured.
#pragma once
#include <cstdint>

namespace normops::cpu {

// The rows of a tile of the forward. They are all summed before they are written, so that their sums, roots and
// divisions are taken together. Wider rows go one by one, each summed, then written.
constexpr int kForwardTile = 16;

struct ForwardConfig {
  int vector_bytes;   // of the instruction set
  int element_bytes;  // of the type in whose order blocks are packed
  // The most bytes of a row that goes in tiles, where a thread writes at most kCachedBytes, and where it writes more.
  int64_t tiled_bytes, tiled_bytes_beyond;
};

// What a thread may write so that the second-level cache has room for it beside what is read.
constexpr int64_t kCachedBytes = 1 << 20;

// No row of a tile may have more columns than a span.
constexpr int64_t kMostTiledBytes = 2048;

// The time of rows one by one over that in tiles, for rows of 64, 128, 256 and 512 columns of rms_norm: with 4 MiB that
// are written again and again to four places in turn / with 256 KiB to one place.
constexpr ForwardConfig kForwardConfigs[] = {
    // as float32, not measured
    {64, 8, kMostTiledBytes, 511},
    // 1.12 1.01 0.91 0.60 / 1.23 1.19 1.07 0.97; add_rms_norm 0.78 0.69 0.63 0.68 / 1.06 1.12 1.03 1.07
    {64, 4, kMostTiledBytes, 511},
    // bfloat16: 1.52 1.56 1.89 1.43 / 1.50 1.54 1.90 1.49
    {64, 2, kMostTiledBytes, kMostTiledBytes},
    // as float32, not measured
    {32, 8, kMostTiledBytes, kMostTiledBytes / 2},
    // 1.41 1.16 1.02 0.65 / 1.62 1.51 1.71 1.15
    {32, 4, kMostTiledBytes, kMostTiledBytes / 2},
    // bfloat16: 3.13 2.18 1.70 1.34 / 3.16 2.31 1.72 1.37
    {32, 2, kMostTiledBytes, kMostTiledBytes},
    // as float32, not measured
    {16, 8, kMostTiledBytes, kMostTiledBytes / 2},
    // 1.58 1.69 1.03 0.65 / 1.59 1.84 1.39 1.20, on SSE2; NEON was not measured
    {16, 4, kMostTiledBytes, kMostTiledBytes / 2},
    // bfloat16: 1.34 1.19 1.09 1.04 / 1.35 1.19 1.10 1.05
    {16, 2, kMostTiledBytes, kMostTiledBytes},
};

constexpr int64_t tiled_bytes(int vector_bytes, int element_bytes, int64_t written_bytes) {
  for (const ForwardConfig& config : kForwardConfigs) {
    if (config.vector_bytes != vector_bytes || config.element_bytes != element_bytes) continue;
    return written_bytes <= kCachedBytes ? config.tiled_bytes : config.tiled_bytes_beyond;
  }
  return 0;
}

// Four blocks of a row are loaded before the first of them is stored, where there are 16 registers of 32 bytes.
constexpr bool loads_ahead(int vector_bytes) { return vector_bytes >= 32; }

// The backward. The numbers are the times of alternatives, over that of what stands here (Zen 4, 2026-11-24).

// The most rows of a tile, all of whose sums are formed before it is written: a multiple of four, as four sums are
// folded together. Four rows: 1.1 to 1.3 up to 128 columns. Sixteen: 0.9 to 1.1.
constexpr int kBackwardTile = 8;

// Rows of one group that are written at once, as they share what is loaded of the scale and the sum. One: 1.1 to
// 1.2 in the gated backward of bfloat16 on AVX2; four: 1.0 to 1.1 there and 1.1 to 1.2 on AVX-512.
constexpr int kWriteRows = 2;

// The most rows of each group that a tile has if there are several groups. One: 1.1 to 1.6; two: 1.0 to 1.1.
constexpr int kRowsPerGroup = 4;

// If a thread's rows take more bytes than this, they are prefetched into the second-level cache: the memory that a tile
// is written to while the tile is summed, and the rows of the next tile while this one is written. Without: 1.1 to 2.0
// beyond the second-level cache; always: 1.1 for what fits it, 64 x 4096 float32 and 333 x 100 bfloat16 on AVX-512.
constexpr int64_t kPrefetchBytes = int64_t{3} << 20;

// Rows up to this width that follow one another are read ahead well enough by the processor, so that they are neither
// prefetched nor written around the caches. With both: 1.0 to 1.2 in the third-level cache, up to 1.6 beyond it. Wider
// rows that were not written around the caches: 0.9 to 1.2 beyond them, 1.1 at 4096 x 4096 float32 on AVX-512.
constexpr int64_t kReadAheadRowBytes = 256;

struct BackwardConfig {
  int vector_bytes;
  // How much of the second-level cache x and dy of a tile may take, as the second pass should find them there. 64 KiB
  // on AVX-512: 1.2 at 64 x 4096 float32. 256 KiB on AVX2: 0.9 there, but 1.25 on a processor that has no AVX-512, as
  // those have less of that cache.
  int64_t tile_bytes;
  // Whether both sums of a row are formed at once, for which AVX2 has too few registers. Not so on AVX-512: 1.1 to 1.2
  // from 1024 columns of bfloat16 on. So on AVX2: 1.1 up to 128 columns, 0.8 to 0.9 at 4096 x 4096 float32.
  bool both_sums;
  bool may_prefetch;  // This was not measured with narrower registers.
};

constexpr BackwardConfig kBackwardConfigs[] = {
    {64, 256 << 10, true, true}, {32, 64 << 10, false, true}, {16, 64 << 10, false, false}};

constexpr BackwardConfig backward_config(int vector_bytes) {
  for (const BackwardConfig& config : kBackwardConfigs) {
    if (config.vector_bytes == vector_bytes) return config;
  }
  return {};
}

}  // namespace normops::cpu
