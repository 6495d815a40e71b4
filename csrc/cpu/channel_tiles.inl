// Tiles of tensors [samples, channels, positions] whose channels are normalized, and sums over channels. The lanes of a
// register are contiguous positions, and loops iterate over the channels. Each position is summed in row_sums.inl's
// order: a norm over channels has the bits of one over rows.
#include "row_sums.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Some positions of a sample, in all channels.
struct Tile {
  int64_t sample, position, width;
};

// Returns the positions of a tile: 512 bytes of a channel, or fewer, to fit the second-level cache. `bytes` per channel
// and position are read or written in this tile, or read in the next one. A small sample is one tile: 14 x 14 in
// several took 1.1 to 1.3 of the time.
template <class T>
NORMOPS_INLINE int64_t tile_width(const CpuArgs& args, int64_t bytes) {
  constexpr int64_t kTileBytes = 512 << 10, kLeast = 128 / sizeof(T);
  if (args.channels->positions <= kMostPositions) return args.channels->positions;
  int64_t width = 512 / sizeof(T);
  while (width > kLeast && width * args.cols * bytes > kTileBytes) width /= 2;
  return width;
}

// Returns the tile that begins with a row, which is a position of a sample.
NORMOPS_INLINE Tile tile_at(const CpuArgs& args, int64_t row, int64_t end, int64_t width) {
  const int64_t positions = args.channels->positions, position = row % positions;
  if (width > positions - position) width = positions - position;
  return {row / positions, position, width < end - row ? width : end - row};
}

// The channels of a tile, each with contiguous positions.
template <class T>
struct ChannelsOf {
  T* first;
  int64_t stride;  // in bytes

  NORMOPS_INLINE T* operator[](int64_t channel) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + channel * stride);
  }
};

template <class T>
NORMOPS_INLINE ChannelsOf<T> channels_of(const CpuArgs& args, TensorIndex tensor, const Tile& tile) {
  const Channels& channels = *args.channels;
  char* const sample = static_cast<char*>(args[tensor].data) + tile.sample * channels.sample_strides[tensor];
  return {reinterpret_cast<T*>(sample) + tile.position, channels.channel_strides[tensor]};
}

// Returns whether all channels of a tensor begin with a cache line, as non-temporal stores require.
inline bool begins_with_lines(const CpuArgs& args, TensorIndex tensor) {
  const Channels& channels = *args.channels;
  const auto first = reinterpret_cast<int64_t>(args[tensor].data);
  return (first | channels.sample_strides[tensor] | channels.channel_strides[tensor]) % 64 == 0;
}

// Calls visit(std::integral_constant<int, blocks>, position, extent) for the positions of a tile: kBlocks blocks at a
// time, then one.
template <class R, int kBlocks, class Visit>
NORMOPS_INLINE void each_blocks(int64_t width, Visit visit) {
  int64_t position = 0;
  for (; position + kBlocks * kLanes<R> <= width; position += kBlocks * kLanes<R>) {
    visit(std::integral_constant<int, kBlocks>(), position, FullBlock{});
  }
  for_each_block<R>(position, width, [&](int64_t position, auto extent) NORMOPS_INLINE_LAMBDA {
    visit(std::integral_constant<int, 1>(), position, extent);
  });
}

// Computes kSums sums over channels [begin, end) of a span for each position of kBlocks blocks. term(channel,
// accumulators) adds a channel. fold_span() adds 64 chains, each over every 64th column, along a tree. This loop
// computes four chains at a time, in the order in which the tree adds them.
template <class R, int kBlocks, int kSums, class Term>
NORMOPS_INLINE void fold_channels(int64_t begin, int64_t end, Block<R> (&sums)[kBlocks][kSums], Term term) {
  static_assert(sizeof(compute_t<R>) == 4, "rows of float64 have 32 chains");
  constexpr int kReversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
  Block<R> parts[16][kBlocks][kSums];
#pragma GCC unroll 1
  for (int i = 0; i < 16; i++) {
    Block<R> chains[4][kBlocks][kSums] = {};
    int64_t channel = begin + kReversed[i];
    for (; channel + 48 < end; channel += 64) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) term(channel + 16 * k, chains[k]);
    }
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++) {
      if (channel + 16 * k < end) term(channel + 16 * k, chains[k]);
    }
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; b++) {
#pragma GCC unroll 2
      for (int s = 0; s < kSums; s++) {
        parts[i][b][s] = (chains[0][b][s] + chains[1][b][s]) + (chains[2][b][s] + chains[3][b][s]);
      }
    }
  }
  for (int b = 0; b < kBlocks; b++) {
    for (int s = 0; s < kSums; s++) {
      for (int count = 8; count > 0; count /= 2) {
        for (int i = 0; i < count; i++) parts[i][b][s] = parts[2 * i][b][s] + parts[2 * i + 1][b][s];
      }
      sums[b][s] = parts[0][b][s];
    }
  }
}

// Computes the sums over all channels: the sums of spans are added in double, and rounded.
template <class R, int kBlocks, int kSums, class Term>
NORMOPS_INLINE void sum_channels(int64_t channels, Block<R> (&sums)[kBlocks][kSums], Term term) {
  fold_channels<R>(0, span_end(0, channels), sums, term);
  if (channels <= kSpan) return;
  float numbers[kBlocks * kSums * kLanes<R>];
  double totals[std::size(numbers)] = {};
  for (int64_t begin = 0;;) {
    std::memcpy(numbers, sums, sizeof numbers);
    for (size_t i = 0; i < std::size(numbers); i++) totals[i] += numbers[i];
    if ((begin += kSpan) >= channels) break;
    fold_channels<R>(begin, span_end(begin, channels), sums, term);
  }
  for (size_t i = 0; i < std::size(numbers); i++) numbers[i] = static_cast<float>(totals[i]);
  std::memcpy(sums, numbers, sizeof numbers);
}

// Blocks of positions that are summed at once, so that few accumulators are spilled: four chains of each sum. float32
// on AVX-512 always uses four blocks, for fewer page lookups per channel (0.8 of the time of a backward).
template <class R, int kSums>
constexpr int kSummedBlocks =
    NORMOPS_VECTOR_BYTES == 64 ? (kEvenOdd<R> ? 2 / kSums : 4) : std::max(2 / (kSums * Block<R>::kVectors), 1);

// Numbers of the positions of a tile, with room for a full last block.
using OfPositions = float[kMostPositions + kLongestBlock];

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
