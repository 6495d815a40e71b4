// The kernels of channel_rms_norm and its backward, compiled once per instruction set by foreach_isa.h. For the
// channels x of each position, and the gradient dy of the activation's argument:
//   y = activation(x * rstd * w + bias), rstd = 1 / sqrt(mean(x^2) + eps)
//   dx = dy * rstd * w - x * rstd^3 * mean(dy * w * x)
//   dw = the sum over positions of dy * rstd * x, dbias = the sum over positions of dy
// Read from the end: forward() and backward() divide the rows of a call, which are positions, into tiles.
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "channel_rms_norm_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(ChannelRmsNormKernels, channel_rms_norm_kernels, kChannelRmsNormKernels)
#else
#include "activation.inl"
#include "channel_tiles.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Computes rstd of a tile's positions (kSquares), and minus_c (kDots), in T's packed order. Prefetches the channels
// `to_prefetch`, unless they are null.
template <class T, class G, bool kSquares, bool kDots>
[[gnu::noinline]] void sum_positions(const CpuArgs& args, const ChannelsOf<const T>& x, const ChannelsOf<const G>& dy,
                                     const ChannelsOf<T>& to_prefetch, int64_t width, float* rstd, float* minus_c) {
  constexpr int kSums = kSquares + kDots, kAtOnce = kSummedBlocks<T, kSums>;
  const auto* const scale = static_cast<const float*>(args.scale);
  each_blocks<T, kAtOnce>(width, [&](auto count, int64_t position, auto extent) NORMOPS_INLINE_LAMBDA {
    constexpr int kBlocks = decltype(count)::value;
    Block<T> sums[kBlocks][kSums];
    sum_channels<T>(args.cols, sums, [&](int64_t channel, Block<T>(&sums)[kBlocks][kSums]) NORMOPS_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; b++) {
        const int64_t column = position + b * kLanes<T>;
        if (kSquares && to_prefetch.first != nullptr) prefetch(to_prefetch[channel] + column);
        const Block<T> h = load<T>(x[channel] + column, extent);
        if constexpr (kSquares) sums[b][0] = fma(h, h, sums[b][0]);
        if constexpr (kDots) {
          const Block<T> g = load<T>(dy[channel] + column, extent) * broadcast<T>(scale[channel]);
          sums[b][kSums - 1] = fma(g, h, sums[b][kSums - 1]);
        }
      }
    });
    for (int b = 0; b < kBlocks; b++) {
      float numbers[kSums][kLanes<T>];
      for (int s = 0; s < kSums; s++) store_packed<T>(numbers[s], sums[b][s]);
      for (int i = 0; i < kLanes<T>; i++) {
        const int64_t column = position + b * kLanes<T> + i;
        if (kSquares) rstd[column] = rstd_of<T>(numbers[0][i], args.cols, args.eps);
        if (kDots) minus_c[column] = minus_c_of<T>(numbers[kSums - 1][i], rstd[column], args.cols);
      }
    }
  });
}

// Computes x * rstd * scale + bias with a channel's scale and bias.
template <class T>
struct Affine {
  Block<T> scale, bias;

  NORMOPS_INLINE Affine(const CpuArgs& args, int64_t channel)
      : scale(broadcast<T>(static_cast<const float*>(args.scale)[channel])),
        // -0 without a bias: adding -0 is the identity.
        bias(broadcast<T>(args.channel_bias != nullptr ? args.channel_bias[channel] : -0.0f)) {}
  NORMOPS_INLINE Block<T> operator()(const Block<T>& x, const float* rstd) const {
    return x * load_packed<T>(rstd) * scale + bias;
  }
};

// Writes the output of a tile, and prefetches `ahead`, the next one.
template <class T, class StorePolicy, class IsActivated>
[[gnu::noinline]] void write_tile(const CpuArgs& args, const ChannelsOf<const T>& x, const ChannelsOf<const T>& ahead,
                                  const ChannelsOf<T>& y, int64_t width, const float* rstd, StorePolicy non_temporal,
                                  IsActivated) {
  const Activation activation = args.gating.activation;
  for (int64_t channel = 0; channel < args.cols; channel++) {
    const T *const row = x[channel], *const next = ahead[channel];
    T* const target = y[channel];
    const Affine<T> affine(args, channel);
    for_each_block<T>(0, width, [&, affine](int64_t position, auto extent) NORMOPS_INLINE_LAMBDA {
      prefetch(next + position);
      Block<T> block = affine(load<T>(row + position, extent), rstd + position);
      if constexpr (IsActivated::value) block = activated(block, activation);
      store(target + position, block, extent, non_temporal);
    });
  }
}

// Returns the first row, from this one on, where a tile may begin: a multiple of 64 positions in its sample.
inline int64_t tile_boundary(const CpuArgs& args, int64_t row) {
  constexpr int64_t kTileStart = 64;
  const int64_t positions = args.channels->positions, position = row % positions,
                next = (position + kTileStart - 1) / kTileStart * kTileStart;
  return row - position + (next < positions ? next : positions);
}

template <class T>
void forward(const CpuArgs& args, int64_t begin, int64_t end) {
  const bool non_temporal = args.non_temporal && begins_with_lines(args, kOutput);
  const int64_t width = tile_width<T>(args, 3 * sizeof(T));
  alignas(64) OfPositions rstd;
  begin = tile_boundary(args, begin), end = tile_boundary(args, end);
  for (Tile tile, ahead = tile_at(args, begin, end, width); begin < end;) {
    tile = ahead;
    begin += tile.width;
    if (begin < end) ahead = tile_at(args, begin, end, width);
    const auto x = channels_of<const T>(args, kInput, tile), next = channels_of<const T>(args, kInput, ahead);
    const auto y = channels_of<T>(args, kOutput, tile);
    sum_positions<T, T, true, false>(args, x, {}, non_temporal ? ChannelsOf<T>() : y, tile.width, rstd, nullptr);
    dispatch_bool<true>(non_temporal, [&](auto policy) {
      dispatch_bool<true>(args.channels->is_activated, [&](auto is_activated) {
        write_tile<T>(args, x, next, y, tile.width, rstd, policy, is_activated);
      });
    });
  }
  if (non_temporal) finish_non_temporal();
}

// Computes the gradient of the activation's argument: grad_output times the activation's slope.
template <class T>
[[gnu::noinline]] void form_gradients(const CpuArgs& args, const ChannelsOf<const T>& x,
                                      const ChannelsOf<const T>& grad_output, int64_t width, const float* rstd,
                                      const ChannelsOf<float>& formed) {
  const Activation activation = args.gating.activation;
  for (int64_t channel = 0; channel < args.cols; channel++) {
    const T *const row = x[channel], *const gradient = grad_output[channel];
    float* const target = formed[channel];
    const Affine<T> affine(args, channel);
    for_each_block<T>(0, width, [&, affine](int64_t position, auto extent) NORMOPS_INLINE_LAMBDA {
      const Block<T> z = affine(load<T>(row + position, extent), rstd + position);
      const Block<T> slope = activated(z, smaller_part(z), activation).slope;
      store(target + position, load<T>(gradient + position, extent) * slope, extent);
    });
  }
}

template <class T, class G, class StorePolicy>
[[gnu::noinline]] void write_gradients(const CpuArgs& args, const ChannelsOf<const T>& x, const ChannelsOf<const G>& dy,
                                       const ChannelsOf<const T>& ahead, const ChannelsOf<const T>& dy_ahead,
                                       const ChannelsOf<T>& dx, int64_t width, const float* rstd, const float* minus_c,
                                       StorePolicy non_temporal) {
  const auto* const scale = static_cast<const float*>(args.scale);
  for (int64_t channel = 0; channel < args.cols; channel++) {
    const T *const row = x[channel], *const next = ahead[channel], *const next_dy = dy_ahead[channel];
    const G* const gradient = dy[channel];
    T* const target = dx[channel];
    const Block<T> w = broadcast<T>(scale[channel]);
    for_each_block<T>(0, width, [&](int64_t position, auto extent) NORMOPS_INLINE_LAMBDA {
      prefetch(next + position);
      prefetch(next_dy + position);
      const Block<T> h = load<T>(row + position, extent), g = load<T>(gradient + position, extent);
      const Block<T> rest = load_packed<T>(minus_c + position) * h;
      store(target + position, fma(g * load_packed<T>(rstd + position), w, rest), extent, non_temporal);
    });
  }
}

constexpr int kRegisterLanes = NORMOPS_VECTOR_BYTES / 4;

// Transposes registers: element l of register i becomes element i of register l.
template <int kDistance, int... kLane>
NORMOPS_INLINE void exchange(f32_vector& a, f32_vector& b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  const f32_vector first = shuffle<(kLane & kDistance ? kCount + kLane - kDistance : kLane)...>(a, b);
  b = shuffle<(kLane & kDistance ? kCount + kLane : kLane + kDistance)...>(a, b);
  a = first;
}
template <int kDistance = kRegisterLanes / 2>
NORMOPS_INLINE void transpose(f32_vector (&v)[kRegisterLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kRegisterLanes; i++) {
    if (!(i & kDistance)) exchange<kDistance>(v[i], v[i + kDistance], RegisterLanes());
  }
  if constexpr (kDistance > 1) transpose<kDistance / 2>(v);
}

// The positions that are transposed at a time: two registers of float32, or one of bfloat16, whose adjacent elements
// move as one number of 32 bits.
constexpr int kRows = 2 * kRegisterLanes;

// Loads a register of channels, from `channel` on, for each of kRows positions.
template <class T, class Extent>
NORMOPS_INLINE void load_rows(const ChannelsOf<const T>& tensor, int64_t channel, int64_t channels, int64_t position,
                              Extent extent, f32_vector (&rows)[kRows]) {
  constexpr int kCount = sizeof(f32_vector) / sizeof(T);
  for (int64_t first = 0; first < kRows; first += kCount) {
    int64_t left = kCount;
    if constexpr (!std::is_same_v<Extent, FullBlock>) left = extent.lanes - first;
    if (left <= 0) return;
    f32_vector v[kRegisterLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kRegisterLanes; i++) {
      const T* const source = tensor[channel + i < channels ? channel + i : channels - 1] + position + first;
      if (left >= kCount) {
        v[i] = load_vector<f32_vector>(source);
      } else {
        T lanes[kCount];
        load_part(lanes, source, left);
        v[i] = load_vector<f32_vector>(lanes);
      }
    }
    transpose(v);
    for (int i = 0; i < kRegisterLanes; i++) {
      if constexpr (sizeof(T) == 2) {
        const auto pairs = bit_cast<u32_vector>(v[i]);
        rows[2 * i] = bit_cast<f32_vector>(pairs << 16);
        rows[2 * i + 1] = bit_cast<f32_vector>(pairs & 0xffff0000);
      } else {
        rows[first + i] = v[i];
      }
    }
  }
}

// Adds the rows of positions [begin, end) of a tile to the sums of a leaf, one after another. `rstd` is in the order of
// positions.
template <class T, class G>
[[gnu::noinline]] void add_rows(const CpuArgs& args, const ChannelsOf<const T>& x, const ChannelsOf<const G>& dy,
                                int64_t begin, int64_t end, const float* rstd, float* weight_sum, float* bias_sum) {
  alignas(64) f32_vector h[kRows], g[kRows];
  for (int64_t channel = 0; channel < args.cols; channel += kRegisterLanes) {
    f32_vector of_weight = {}, of_bias = {};
    if (weight_sum != nullptr) of_weight = load_vector<f32_vector>(weight_sum + channel);
    if (bias_sum != nullptr) of_bias = load_vector<f32_vector>(bias_sum + channel);
    const auto add = [&](int64_t position, int64_t count, auto extent) NORMOPS_INLINE_LAMBDA {
      load_rows(dy, channel, args.cols, position, extent, g);
      if (bias_sum != nullptr) {
        for (int64_t i = 0; i < count; i++) of_bias += g[i];
      }
      if (weight_sum == nullptr) return;
      load_rows(x, channel, args.cols, position, extent, h);
      for (int64_t i = 0; i < count; i++) of_weight = fma_vector(g[i] * rstd[position + i], h[i], of_weight);
    };
    int64_t position = begin;
    for (; position + kRows <= end; position += kRows) add(position, kRows, FullBlock{});
    if (position < end) add(position, end - position, PartialBlock{end - position});
    if (weight_sum != nullptr) write(weight_sum + channel, of_weight, Cached{});
    if (bias_sum != nullptr) write(bias_sum + channel, of_bias, Cached{});
  }
}

// Computes the sums of a region's leaves in the same order as the kernels of rows.
class LeafSums {
 public:
  LeafSums(const CpuArgs& args, const Region& region) : args_(args), first_leaf_(region.row / args.rows_per_leaf) {}

  // Adds the rows of a tile that begins with `row`.
  template <class T, class G>
  void add(const ChannelsOf<const T>& x, const ChannelsOf<const G>& dy, int64_t row, int64_t width,
           const float* rstd) const {
    for (int64_t begin = 0, end; begin < width; begin = end) {
      const int64_t leaf = (row + begin) / args_.rows_per_leaf, first = leaf * args_.rows_per_leaf,
                    last = args_.rows - first < args_.rows_per_leaf ? args_.rows : first + args_.rows_per_leaf;
      end = last - row < width ? last - row : width;
      float* const sums[] = {sum_of(args_.grad_weight_sums, leaf), sum_of(args_.grad_bias_sums, leaf)};
      for (float* const sum : sums) {
        if (sum != nullptr && row + begin == first) std::memset(sum, 0, args_.sum_stride * sizeof(float));
      }
      add_rows<T, G>(args_, x, dy, begin, end, rstd, sums[0], sums[1]);
      if (row + end < last) continue;
      for (float* const sum : sums) {
        if (sum != nullptr) add_last(sum, merges_after(first_leaf_, leaf + 1));
      }
    }
  }

 private:
  float* sum_of(void* sums, int64_t leaf) const {
    return sums == nullptr ? nullptr : static_cast<float*>(sums) + sum_count(first_leaf_, leaf) * args_.sum_stride;
  }

  // Adds the last sum to the one before it, `merges` times.
  void add_last(float* last, int merges) const {
    for (; merges > 0; merges--, last -= args_.sum_stride) {
      float* const before = last - args_.sum_stride;
      for (int64_t i = 0; i < args_.sum_stride; i++) before[i] += last[i];
    }
  }

  const CpuArgs& args_;
  const int64_t first_leaf_;
};

template <class T>
void backward(const CpuArgs& args, const Region& region) {
  const LeafSums sums(args, region);
  const bool has_sums = args.grad_weight_sums != nullptr || args.grad_bias_sums != nullptr;
  int64_t row = region.row, end = region.row + region.rows;
  if (!has_sums) row = tile_boundary(args, row), end = tile_boundary(args, end);  // otherwise a leaf's bounds
  const bool non_temporal = args.non_temporal && begins_with_lines(args, kGradInput) &&
                            row % args.channels->positions * sizeof(T) % 64 == 0;  // other tiles begin with lines
  const int64_t width = tile_width<T>(args, 5 * sizeof(T) + (args.channels->is_activated ? sizeof(float) : 0));
  alignas(64) OfPositions rstd, minus_c, natural_rstd;
  const ChannelsOf<float> formed = {static_cast<float*>(args.row_scratch), kFormedPositions * sizeof(float)};
  for (Tile tile, ahead = tile_at(args, row, end, width); row < end; row += tile.width) {
    tile = ahead;
    if (row + tile.width < end) ahead = tile_at(args, row + tile.width, end, width);
    const auto x = channels_of<const T>(args, kInput, tile), next = channels_of<const T>(args, kInput, ahead),
               grad_output = channels_of<const T>(args, kGradOutput, tile),
               next_dy = channels_of<const T>(args, kGradOutput, ahead);
    const bool writes = args.has(kGradInput);
    const auto dx = writes ? channels_of<T>(args, kGradInput, tile) : ChannelsOf<T>(),
               to_prefetch = non_temporal ? ChannelsOf<T>() : dx;
    const auto finish = [&]<class G>(const ChannelsOf<const G>& dy) {
      for_each_block<T>(0, tile.width, [&](int64_t position, auto) {
        store(natural_rstd + position, load_packed<T>(rstd + position));
      });
      if (has_sums) sums.add<T, G>(x, dy, row, tile.width, natural_rstd);
      if (!writes) return;
      dispatch_bool<true>(non_temporal, [&](auto policy) {
        write_gradients<T, G>(args, x, dy, next, next_dy, dx, tile.width, rstd, minus_c, policy);
      });
    };
    if (!args.channels->is_activated) {
      sum_positions<T, T, true, true>(args, x, grad_output, to_prefetch, tile.width, rstd, minus_c);
      finish(grad_output);
    } else {
      sum_positions<T, T, true, false>(args, x, {}, to_prefetch, tile.width, rstd, nullptr);
      form_gradients<T>(args, x, grad_output, tile.width, rstd, formed);
      const ChannelsOf<const float> dy = {formed.first, formed.stride};
      sum_positions<T, float, false, true>(args, x, dy, to_prefetch, tile.width, rstd, minus_c);
      finish(dy);
    }
  }
  if (non_temporal) finish_non_temporal();
}

void forward_of(const CpuArgs& args, int64_t begin, int64_t end) {
  args.channels->dtype == DType::bfloat16 ? forward<bfloat16>(args, begin, end) : forward<float>(args, begin, end);
}

void backward_of(const CpuArgs& args, const Region& region) {
  args.channels->dtype == DType::bfloat16 ? backward<bfloat16>(args, region) : backward<float>(args, region);
}

}  // namespace

extern const ChannelRmsNormKernels kChannelRmsNormKernels;
const ChannelRmsNormKernels kChannelRmsNormKernels = {forward_of, backward_of};

}  // namespace normops::cpu::NORMOPS_ISA
#endif
