// What the kernels of forward and backward have in common: where a thread's packs of a row are, and rstd.
#pragma once
#include "launch_config.h"
#include "reduce.cuh"
#include "rms_norm_launch.h"
#include "vector.cuh"

namespace normops::cuda {

// How kernels access tensors: any of them (General), or those that models have (Plain), with fewer decisions to take
// for each row. They compute the same.

// A tensor's rows.
template <class T>
struct RowsOf {
  T* data;
  RowLayout layout;
  bool aligned;  // see load_elements

  template <int kCount, class Index>
  __device__ Elements<std::remove_const_t<T>, kCount> load(const T* row, Index column, Index count) const {
    return load_elements<std::remove_const_t<T>, kCount>(row + column, count, aligned);
  }

  template <int kCount, class Index>
  __device__ void store(T* row, Index column, Index count, const Elements<T, kCount>& elements) const {
    store_elements(row + column, elements, count, aligned);
  }

  // Row first + further.
  __device__ T* row(int64_t first, unsigned further = 0) const {
    T* row = data;
    int64_t index = first + further;
    if (layout.dims == 1) return row + index * layout.strides[0];
#pragma unroll 1  // divisions are long
    for (int d = layout.dims - 1; d >= 0; d--) {
      row += index % layout.sizes[d] * layout.strides[d];
      index /= layout.sizes[d];
    }
    return row;
  }
};

// Of T, in packs of as many elements as one of R has.
template <class T, class R, class Void>
RowsOf<T> rows_of(Void* data, const RowLayout& layout, int64_t cols) {
  int64_t bytes = reinterpret_cast<intptr_t>(data) | (cols * static_cast<int64_t>(sizeof(T)));
  for (int d = 0; d < layout.dims; d++) bytes |= layout.strides[d] * static_cast<int64_t>(sizeof(T));
  return {static_cast<T*>(data), layout, bytes % static_cast<int64_t>(kPack<R> * sizeof(T)) == 0};
}

// Aligned rows, at equal distances.
template <class T>
struct PlainRowsOf {
  static constexpr bool aligned = true;
  T* data;
  int64_t stride;

  explicit PlainRowsOf(const RowsOf<T>& rows)
      : data(rows.data), stride(rows.layout.dims == 0 ? 0 : rows.layout.strides[0]) {}

  template <int kCount, class Index>
  __device__ Elements<std::remove_const_t<T>, kCount> load(const T* row, Index column, Index count) const {
    return load_elements<std::remove_const_t<T>, kCount>(row + column, count, aligned);
  }

  template <int kCount, class Index>
  __device__ void store(T* row, Index column, Index count, const Elements<T, kCount>& elements) const {
    store_elements(row + column, elements, count, aligned);
  }

  __device__ T* row(int64_t first, unsigned further = 0) const { return data + first * stride + further * stride; }
};

// The scale of the columns, for packs of T: what hold() loads before a row is summed, numbers() takes after it.
template <class T>
struct ScaleOf {
  struct Held {};
  Weight weight;
  bool aligned;

  template <class Index>
  __device__ Held hold(Index, Index) const {
    return {};
  }

  template <class Index>
  __device__ Numbers<T> numbers(Held, Index column, Index count) const {
    return load_scale<T>(weight.data, weight.dtype, weight.offset, column, count, aligned);
  }
};

// An aligned weight of T.
template <class T>
struct PlainScaleOf {
  using Held = Pack<T>;
  const T* weight;
  compute_t<T> offset;

  explicit PlainScaleOf(const ScaleOf<T>& scale)
      : weight(static_cast<const T*>(scale.weight.data)), offset(static_cast<compute_t<T>>(scale.weight.offset)) {}

  template <class Index>
  __device__ Held hold(Index column, Index count) const {
    return load_elements<T, kPack<T>>(weight + column, count, true);
  }

  template <class Index>
  __device__ Numbers<T> numbers(const Held& held, Index, Index) const {
    Numbers<T> scale = to_compute<T>(held);
    if (offset != 0) {
      keep_order();  // a jump: else there would be additions that are not carried out
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) scale.element[i] += offset;
    }
    return scale;
  }
};

struct General {
  template <class T>
  using Rows = RowsOf<T>;
  template <class T>
  using Scale = ScaleOf<T>;
};

struct Plain {
  template <class T>
  using Rows = PlainRowsOf<T>;
  template <class T>
  using Scale = PlainScaleOf<T>;
};

// float64 has no speed to gain, and 16 packs no registers to hold the scale of.
template <int kPacks, class R>
constexpr bool kHasPlain = kPacks > 0 && kPacks <= 4 && !std::is_same_v<R, double>;

// Calls launch.template operator()<Access>() with the access that serves a thread's packs of these.
template <int kPacks, class R, class Launch, class... Rows>
void dispatch_access(const ScaleOf<R>& scale, Launch launch, const Rows&... rows) {
  if constexpr (kHasPlain<kPacks, R>) {
    const bool is_plain = scale.weight.data != nullptr && scale.weight.dtype == kDType<R> && scale.aligned;
    if (is_plain && ((rows.aligned && rows.layout.dims <= 1) && ...)) return launch.template operator()<Plain>();
  }
  launch.template operator()<General>();
}

template <class T>
ScaleOf<T> scale_of(const Weight& weight, int64_t cols) {
  return {weight, reinterpret_cast<intptr_t>(weight.data) % 16 == 0 && cols % kPack<T> == 0};
}

// The columns of a thread's packs. Index is as wide as the row needs: 32 bits take fewer registers.
template <class T, class Index>
struct Columns {
  Index cols;
  Index first = static_cast<Index>((cluster_rank() * blockDim.x + threadIdx.x) * kPack<T>);
  Index step = static_cast<Index>(cluster_blocks() * blockDim.x * kPack<T>);

  __device__ explicit Columns(int64_t cols) : cols(static_cast<Index>(cols)) {}
  __device__ Index column(Index pack) const { return first + pack * step; }
  // From where of_row() says.
  __device__ Index offset(Index pack) const { return pack * step; }
  // How many elements of the pack are inside the row: none or less if it is behind it.
  __device__ Index count(Index pack) const { return cols - column(pack); }

  // The first of the thread's elements, of a row that begins there. The address is made once.
  template <class W>
  __device__ W* of_row(W* row) const {
    W* place = row + first;
    forget(place);
    return place;
  }
};

// The rows that a thread has a part of, blockDim.y apart, of those that the block takes.
struct TakenRows {
  int64_t first;
  int64_t left;  // in the tensor, from there on

  __device__ TakenRows(int64_t block_first, int64_t rows) : first(block_first + threadIdx.y), left(rows - first) {}
  __device__ unsigned further(int r) const { return r * blockDim.y; }
  __device__ bool has(int r) const { return further(r) < left; }
};

// Between the packs of a thread: what is loaded for one of them is not to wait in registers while others are dealt
// with.
template <int kPacks>
__device__ void keep_few_registers() {
  if (kPacks == 4) keep_order();
  if (kPacks == 16) keep_order_of_warp();
}

// A thread's packs of a row; zeros unless it is one. The choice is made once: the loads then follow one another.
template <class R, class Rows, class T, int kPacks>
__device__ void load_packs(Elements<T, kPack<R>> (&packs)[kPacks], const Rows& rows, const T* row, bool is_row,
                           const Columns<R, int>& columns) {
  const T* const place = columns.of_row(row);
  if (rows.aligned) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      packs[p] = load_elements<T, kPack<R>>(place + columns.offset(p), is_row ? columns.count(p) : 0, true);
    }
  } else if (!is_row) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) packs[p] = {};
  } else {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      packs[p] = load_elements<T, kPack<R>>(place + columns.offset(p), columns.count(p), false);
      if (kPacks == 16) keep_few_registers<kPacks>();  // elements that are loaded one by one take one each
    }
  }
}

// Between two passes over packs: numbers of 16 bits take half the registers that they take once converted, so that
// they are to be converted again.
template <class T, int kCount, int kPacks>
__device__ void keep_packed(Elements<T, kCount> (&packs)[kPacks]) {
  if constexpr (Elements<T, kCount>::kPairs) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
#pragma unroll
      for (int i = 0; i < Elements<T, kCount>::kWords; i++) forget(packs[p].words[i]);
    }
  }
}

// What is not loaded yet.
template <class Nothing, int kPacks>
__device__ void keep_packed(Nothing (&)[kPacks]) {}

// Rows that are read twice are summed in float64 after so many packs.
constexpr int kPacksOfChain = 4;

// rstd = 1 / sqrt(mean(x^2) + eps): forward and backward form it of the same sums, so that both see the same bits where
// both hold the row (backward_config says where the backward cannot).
__device__ inline float rstd_of(float square_sum, double inverse_cols, double eps) {
  return __frsqrt_rn(static_cast<float>(square_sum * inverse_cols + eps));
}

__device__ inline double rstd_of(double square_sum, double inverse_cols, double eps) {
  return 1 / sqrt(square_sum * inverse_cols + eps);
}

// Chains of additions in a thread: element i of a pack goes to chain i % kChains.
template <class T>
constexpr int kChains = kPack<T> < 4 ? kPack<T> : 4;

// chains += x^2
template <class T>
__device__ void add_squares(const Pack<T>& pack, compute_t<T> (&chains)[kChains<T>]) {
  const Numbers<T> x = to_compute<T>(pack);
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) {
    compute_t<T>& chain = chains[i % kChains<T>];
    chain = fma_rn(x.element[i], x.element[i], chain);
  }
}

// Blocks of threads for `rows` rows, of which each block takes so many at once.
constexpr int64_t blocks_of_rows(int64_t rows, int64_t rows_at_once) {
  return (rows + rows_at_once - 1) / rows_at_once;
}

// Rows of at most a warp share a block, along its y dimension; wider ones have it to themselves, see sum_row.
inline dim3 block_of(const RowConfig& config) {
  const unsigned threads = config.threads;
  return dim3(threads, threads <= kWarp ? kBlockThreads / threads : 1);
}

// Calls launch.template operator()<kPacks>() with the configuration's packs; 0 is any width.
template <class Launch>
void dispatch_packs(int packs, Launch launch) {
  switch (packs) {
    case 1:
      return launch.template operator()<1>();
    case 2:
      return launch.template operator()<2>();
    case 4:
      return launch.template operator()<4>();
    case 16:
      return launch.template operator()<16>();
    default:
      return launch.template operator()<0>();
  }
}

}  // namespace normops::cuda
