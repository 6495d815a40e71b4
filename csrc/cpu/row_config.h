// The tuning parameters of the CPU kernels, by instruction set, type and size of a call. They affect the time of a
// call, but no bit of its result. Ratios are times on one thread [Zen 4, 2026-11-24]; docs/notes/cpu.md describes the
// measurements.
#pragma once
#include <cstdint>

namespace normops::cpu {

// The rows of a forward tile. All are summed before any is written, so that their sums, roots and divisions are
// computed together. Wider rows are not tiled: each is summed, then written.
constexpr int kForwardTile = 16;

struct ForwardConfig {
  int vector_bytes;   // of the instruction set
  int element_bytes;  // of the type that sets the packed order of blocks
  // Maximum bytes of a tiled row, if a thread writes at most kCachedBytes, and if it writes more.
  int64_t tiled_bytes, tiled_bytes_beyond;
};

// Maximum bytes that a thread may write so that they fit the second-level cache together with the bytes that it reads.
constexpr int64_t kCachedBytes = 1 << 20;

// A row of a tile has at most one span of columns.
constexpr int64_t kMostTiledBytes = 2048;

// Time of untiled over tiled rows, for 64, 128, 256 and 512 columns of rms_norm: writing 4 MiB repeatedly to four
// buffers in turn / writing 256 KiB to one buffer.
constexpr ForwardConfig kForwardConfigs[] = {
    // like float32, not measured
    {64, 8, kMostTiledBytes, 511},
    // 1.12 1.01 0.91 0.60 / 1.23 1.19 1.07 0.97; add_rms_norm 0.78 0.69 0.63 0.68 / 1.06 1.12 1.03 1.07
    {64, 4, kMostTiledBytes, 511},
    // bfloat16: 1.52 1.56 1.89 1.43 / 1.50 1.54 1.90 1.49
    {64, 2, kMostTiledBytes, kMostTiledBytes},
    // like float32, not measured
    {32, 8, kMostTiledBytes, kMostTiledBytes / 2},
    // 1.41 1.16 1.02 0.65 / 1.62 1.51 1.71 1.15
    {32, 4, kMostTiledBytes, kMostTiledBytes / 2},
    // bfloat16: 3.13 2.18 1.70 1.34 / 3.16 2.31 1.72 1.37
    {32, 2, kMostTiledBytes, kMostTiledBytes},
    // like float32, not measured
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

// Returns whether four blocks of a row are loaded before the first is stored: needs 16 registers of 32 bytes.
constexpr bool loads_ahead(int vector_bytes) { return vector_bytes >= 32; }

// The backward. Numbers are times of alternatives over that of the chosen value [Zen 4, 2026-11-24].

// Maximum rows of a tile; all are summed before any is written. A multiple of four, as four sums are folded together.
// Four rows: 1.1 to 1.3 up to 128 columns. Sixteen: 0.9 to 1.1.
constexpr int kBackwardTile = 8;

// Rows of one group that are written together, and share the loads of the scale and the sum. One: 1.1 to 1.2 in the
// gated backward of bfloat16 on AVX2; four: 1.0 to 1.1 there and 1.1 to 1.2 on AVX-512.
constexpr int kWriteRows = 2;

// Maximum rows of each group in a tile of several groups. One: 1.1 to 1.6; two: 1.0 to 1.1.
constexpr int kRowsPerGroup = 4;

// Above this number of bytes, a thread prefetches its rows into the second-level cache. While it sums a tile, it
// prefetches the outputs of the tile, and while it writes a tile, the inputs of the next one. Without prefetching,
// calls beyond that cache take 1.1 to 2.0 times as long. Prefetching slows calls that fit it by 1.1 [64 x 4096 float32,
// 333 x 100 bfloat16, AVX-512].
constexpr int64_t kPrefetchBytes = int64_t{3} << 20;

// The processor reads contiguous rows up to this width ahead well enough: they use no prefetches and non-temporal
// stores. With both: 1.0 to 1.2 in the third-level cache, up to 1.6 beyond it. Wider rows without non-temporal stores:
// 0.9 to 1.2 beyond the caches, 1.1 at 4096 x 4096 float32 on AVX-512.
constexpr int64_t kReadAheadRowBytes = 256;

struct BackwardConfig {
  int vector_bytes;
  // Maximum bytes of a tile's x and dy, which the second pass should find in the second-level cache. 64 KiB on AVX-512:
  // 1.2 at 64 x 4096 float32. 256 KiB on AVX2: 0.9 there, but 1.25 on a processor without AVX-512, as those have
  // smaller caches.
  int64_t tile_bytes;
  // One loop for both sums of a row; AVX2 has too few registers. Two loops on AVX-512: 1.1 to 1.2 from 1024 columns of
  // bfloat16 on. One loop on AVX2: 1.1 up to 128 columns, 0.8 to 0.9 at 4096 x 4096 float32.
  bool both_sums;
  bool may_prefetch;  // not measured with 16-byte registers
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
