// How kernels access tensors. General serves all of them. Plain, and PlainOfGroups for a weight with groups, serve
// those that models have, with fewer decisions for each row. All compute the same.
#pragma once
#include "kernels.h"
#include "vector.cuh"

namespace normops::cuda {

// The rows of a tensor. Their strides count elements.
template <class T>
struct RowsOf {
  T* data;
  RowLayout layout;
  bool aligned;  // see load_elements

  bool is_plain() const { return aligned && layout.dims <= 1; }

  // Where row `first + further` begins.
  __device__ T* row(int64_t first, int64_t further = 0) const {
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

// The rows of a tensor of T, which are accessed in packs of as many elements as a pack of R has.
template <class T, class R>
RowsOf<T> rows_of(const RowsArg& arg, int64_t cols) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  RowsOf<T> rows = {static_cast<T*>(arg.data), arg.layout, true};
  int64_t bytes = reinterpret_cast<intptr_t>(arg.data) | (cols * kBytes);
  for (int64_t& stride : rows.layout.strides) {
    bytes |= stride;
    stride /= kBytes;
  }
  rows.aligned = bytes % (kPack<R> * kBytes) == 0;
  return rows;
}

// Numbers of rows, if they are given or wanted. Each is accessed by itself, wherever it lies.
template <class Number, int kCount>
struct SumsOfRows {
  Sums what;
  RowsOf<Number> rows[kCount];

  explicit SumsOfRows(const KernelArgs& args) : what(args.sums) {
    constexpr TensorIndex kSums[] = {kSquareSum, kDot};
    for (int i = 0; i < kCount; i++) rows[i] = rows_of<Number, Number>(args[kSums[i]], 1);
  }

  bool is_plain() const { return what == Sums::compute; }
  template <class Other>
  typename Other::template Sums<Number, kCount> as() const {
    return typename Other::template Sums<Number, kCount>(*this);
  }

  __device__ bool are(Sums kind) const { return what == kind; }
  __device__ void read(Number* sums, int64_t first, int64_t further = 0) const {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] = *rows[i].row(first, further);
  }
  // One of the threads that hold the row writes.
  template <class Columns>
  __device__ void write(const Columns& columns, const Number* sums, int64_t first, int64_t further = 0) const {
    if (!columns.has_first()) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) *rows[i].row(first, further) = sums[i];
  }
};

// What the compiler knows to be formed.
template <class Number, int kCount>
struct FormedSums {
  FormedSums() = default;
  explicit FormedSums(const SumsOfRows<Number, kCount>&) {}

  __device__ bool are(Sums kind) const { return kind == Sums::compute; }
  __device__ void read(Number*, int64_t, int64_t = 0) const {}
  template <class Columns>
  __device__ void write(const Columns&, const Number*, int64_t, int64_t = 0) const {}
};

// Rows of T, or of another dtype that a tensor beside one of T may have.
template <class T>
struct AnyRowsOf {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  RowsOf<Byte> bytes;  // `aligned` is that of rows of the dtype
  DType dtype;

  bool is_plain() const { return dtype == kDType<std::remove_const_t<T>> && bytes.is_plain(); }
  __device__ Byte* row(int64_t first, int64_t further = 0) const { return bytes.row(first, further); }
};

template <class T>
AnyRowsOf<T> any_rows_of(const RowsArg& arg, int64_t cols) {
  using Byte = typename AnyRowsOf<T>::Byte;
  return dispatch_beside<std::remove_const_t<T>>(arg.dtype, [&]<class W>() -> AnyRowsOf<T> {
    const bool aligned = rows_of<W, std::remove_const_t<T>>(arg, cols).aligned;
    return {{static_cast<Byte*>(arg.data), arg.layout, aligned}, arg.dtype};
  });
}

// Rows that are added to the normalized ones, or none: kernels with general access ask.
template <class T>
struct BiasOf {
  AnyRowsOf<const T> rows;
  bool rounds;  // whether what they are added to is a number of T

  bool is_plain() const { return rows.bytes.data == nullptr; }
  // To `count` numbers of row `first + further`, from `column` on.
  template <class Index>
  __device__ void add(Numbers<T>& y, int64_t first, int64_t further, Index column, Index count) const {
    if (rows.bytes.data == nullptr) return;
    cast<T>(y, rounds);
    const Numbers<T> bias = load_numbers(rows, rows.row(first, further), column, count);
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) y.element[i] += bias.element[i];
  }
};

template <class T>
BiasOf<T> bias_of(const KernelArgs& args) {
  return {any_rows_of<const T>(args[kBias], args.cols), args.casting.multiplied};
}

template <class T>
struct NoBias {
  explicit NoBias(const BiasOf<T>&) {}
};

// Aligned rows, at equal distances.
template <class T>
struct PlainRowsOf {
  static constexpr bool aligned = true;
  T* data;
  int64_t stride;

  explicit PlainRowsOf(const RowsOf<T>& rows)
      : data(rows.data), stride(rows.layout.dims == 0 ? 0 : rows.layout.strides[0]) {}
  explicit PlainRowsOf(const AnyRowsOf<T>& rows)
      : data(reinterpret_cast<T*>(rows.bytes.data)),
        stride(rows.bytes.layout.dims == 0 ? 0 : rows.bytes.layout.strides[0] / static_cast<int64_t>(sizeof(T))) {}

  __device__ T* row(int64_t first, int64_t further = 0) const { return data + first * stride + further * stride; }
};

// Of a row of these, which begins at `row`.
template <int kCount, class Rows, class T, class Index>
__device__ Elements<std::remove_const_t<T>, kCount> load(const Rows& rows, const T* row, Index column, Index count) {
  return load_elements<std::remove_const_t<T>, kCount>(row + column, count, rows.aligned);
}

template <class Rows, class T, class Index, int kCount>
__device__ void store(const Rows& rows, T* row, Index column, Index count, const Elements<T, kCount>& elements) {
  store_elements(row + column, elements, count, rows.aligned);
}

// As many of any dtype as a pack of T has.
template <class T, class Index>
__device__ Numbers<T> load_numbers(const AnyRowsOf<const T>& rows, const char* row, Index column, Index count) {
  Numbers<T> numbers;
  dispatch_beside<T>(rows.dtype, [&]<class W>() {
    const W* const source = reinterpret_cast<const W*>(row) + column;
    numbers = to_compute<T>(load_elements<W, kPack<T>>(source, count, rows.bytes.aligned));
  });
  return numbers;
}

template <class T, class Index>
__device__ void store_numbers(const AnyRowsOf<T>& rows, char* row, Index column, Index count,
                              const Numbers<T>& numbers) {
  dispatch_beside<T>(rows.dtype, [&]<class W>() {
    store_elements(reinterpret_cast<W*>(row) + column, from_compute<W, T>(numbers), count, rows.bytes.aligned);
  });
}

template <class T, class Index>
__device__ void store_numbers(const PlainRowsOf<T>& rows, T* row, Index column, Index count,
                              const Numbers<T>& numbers) {
  store(rows, row, column, count, from_compute<T>(numbers));
}

// The scale, for packs of T. of_group() is that of a group. Its hold() is called before a row is summed and loads what
// it can, its numbers() is called afterwards and makes numbers of that.
template <class T>
struct ScaleOf {
  Weight weight;
  bool aligned;

  bool is_plain() const { return weight.data != nullptr && weight.dtype == kDType<T> && aligned; }

  class OfGroup {
   public:
    struct Held {};

    __device__ OfGroup(const ScaleOf& scale, int64_t group, int64_t cols) : scale_(scale) {
      const DType dtype = scale.weight.dtype;
      const int64_t bytes = dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
      // All threads write the same value. racecheck reports that.
      weight() = static_cast<const char*>(scale.weight.data) + group * cols * bytes;
    }

    template <class Index>
    __device__ Held hold(Index, Index) const {
      return {};
    }

    template <class Index>
    __device__ Numbers<T> numbers(Held, Index column, Index count) const {
      return load_scale<T>(scale_.weight.data == nullptr ? nullptr : weight(), scale_.weight.dtype,
                           scale_.weight.offset, column, count, scale_.aligned);
    }

   private:
    // In shared memory, as code for all dtypes is short of registers. Each thread reads what it wrote itself.
    static __device__ const char* volatile& weight() {
      __shared__ const char* volatile weight;
      return weight;
    }

    const ScaleOf& scale_;
  };

  __device__ OfGroup of_group(int64_t group, int64_t cols) const { return {*this, group, cols}; }
};

// An aligned weight of T.
template <class T>
struct PlainScaleOf {
  using Held = Pack<T>;
  const T* weight;
  compute_t<T> offset;

  explicit PlainScaleOf(const ScaleOf<T>& scale)
      : weight(static_cast<const T*>(scale.weight.data)), offset(static_cast<compute_t<T>>(scale.weight.offset)) {}

  __device__ PlainScaleOf of_group(int64_t group, int64_t cols) const {
    PlainScaleOf scale = *this;
    scale.weight += group * cols;
    return scale;
  }

  template <class Index>
  __device__ Held hold(Index column, Index count) const {
    return load_elements<T, kPack<T>>(weight + column, count, true);
  }

  template <class Index>
  __device__ Numbers<T> numbers(const Held& held, Index, Index) const {
    Numbers<T> scale = to_compute<T>(held);
    if (offset != 0) {
      compiler_barrier();  // makes the compiler jump over the additions, instead of predicating each
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) scale.element[i] += offset;
    }
    return scale;
  }
};

// How many groups the weight has.
struct Groups {
  int64_t count;
};

struct OneGroup {
  static constexpr int64_t count = 1;
  explicit OneGroup(const Groups&) {}
};

struct General {
  template <class T>
  using Rows = RowsOf<T>;
  template <class T>
  using AnyRows = AnyRowsOf<T>;
  template <class T>
  using Scale = ScaleOf<T>;
  template <class T>
  using Bias = BiasOf<T>;
  template <class Number, int kCount>
  using Sums = SumsOfRows<Number, kCount>;
  using Groups = cuda::Groups;
};

struct Plain {
  template <class T>
  using Rows = PlainRowsOf<T>;
  template <class T>
  using AnyRows = PlainRowsOf<T>;
  template <class T>
  using Scale = PlainScaleOf<T>;
  template <class T>
  using Bias = NoBias<T>;
  template <class Number, int kCount>
  using Sums = FormedSums<Number, kCount>;
  using Groups = OneGroup;
};

struct PlainOfGroups : Plain {
  using Groups = cuda::Groups;
};

// Whether there are kernels for plain access of groups. These, such as heads, are narrow.
template <int kPacks>
constexpr bool kHasPlainOfGroups = kPacks <= 4;

// Calls launch.template operator()<Access>() with the access that serves tensors.
template <int kPacks, class Launch>
void dispatch_access(bool are_plain, int64_t groups, Launch launch) {
  if (are_plain) {
    if (groups == 1) return launch.template operator()<Plain>();
    if constexpr (kHasPlainOfGroups<kPacks>) return launch.template operator()<PlainOfGroups>();
  }
  launch.template operator()<General>();
}

template <class T>
ScaleOf<T> scale_of(const Weight& weight, int64_t cols) {
  return {weight, reinterpret_cast<intptr_t>(weight.data) % 16 == 0 && cols % kPack<T> == 0};
}

}  // namespace normops::cuda
