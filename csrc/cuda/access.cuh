// Access to the rows and parameters of a call. All kernels take the same structs; the template argument Access states
// what a kernel may assume about them. Plain kernels take fewer branches for each row. All kinds of access compute the
// same bits.
#pragma once
#include "kernels.h"
#include "vector.cuh"

namespace normops::cuda {

// Types instead of an enum, so that a profiler shows their names.
struct General {};  // any arguments
struct Plain {};    // aligned rows with one stride, an aligned weight of their dtype, one group, no bias, sums computed
struct PlainOfGroups {};  // the same with any number of groups

template <class Access>
constexpr bool kIsPlain = !std::is_same_v<Access, General>;

// Returns whether plain kernels support an argument; true for types without is_plain().
template <class Argument>
bool is_plain(const Argument& argument) {
  if constexpr (requires { argument.is_plain(); }) {
    return argument.is_plain();
  } else {
    return true;
  }
}

// The rows of a tensor. Their strides count elements.
template <class T>
struct RowsOf {
  using Element = T;
  T* data;
  RowLayout layout;
  bool aligned;  // see load_elements

  bool is_plain() const { return aligned && layout.dims <= 1; }

  // Returns the address of row `first + offset`.
  __device__ T* row(int64_t first, int64_t offset = 0) const {
    T* row = data;
    int64_t index = first + offset;
    if (layout.dims == 1) return row + index * layout.strides[0];
#pragma unroll 1  // divisions take many instructions
    for (int d = layout.dims - 1; d >= 0; d--) {
      row += index % layout.sizes[d] * layout.strides[d];
      index /= layout.sizes[d];
    }
    return row;
  }
};

// Returns the rows of a tensor of T, which are accessed in packs of kPack<R> elements.
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

// Sums over each row, one number for each. Each number is accessed separately, at any address.
template <class Number, int kCount>
struct SumsOfRows {
  Sums what;
  RowsOf<Number> rows[kCount];

  explicit SumsOfRows(const KernelArgs& args) : what(args.sums) {
    constexpr TensorIndex kSums[] = {kSquareSum, kDot};
    for (int i = 0; i < kCount; i++) rows[i] = rows_of<Number, Number>(args[kSums[i]], 1);
  }

  bool is_plain() const { return what == Sums::compute; }

  template <class Access>
  __device__ Sums kind() const {
    return kIsPlain<Access> ? Sums::compute : what;
  }
  __device__ void read(Number* sums, int64_t first, int64_t offset = 0) const {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[i] = *rows[i].row(first, offset);
  }
  // Only the thread with the row's first column writes.
  template <class Columns>
  __device__ void write(const Columns& columns, const Number* sums, int64_t first, int64_t offset = 0) const {
    if (!columns.has_first()) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) *rows[i].row(first, offset) = sums[i];
  }
};

// Rows of T, or of another dtype that can be combined with T, see dispatch_beside.
template <class T>
struct AnyRowsOf {
  using Element = T;
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  RowsOf<Byte> bytes;  // `aligned` refers to elements of the dtype
  DType dtype;

  bool is_plain() const { return dtype == kDType<std::remove_const_t<T>> && bytes.is_plain(); }
  __device__ Byte* row(int64_t first, int64_t offset = 0) const { return bytes.row(first, offset); }
};

template <class T>
AnyRowsOf<T> any_rows_of(const RowsArg& arg, int64_t cols) {
  using Byte = typename AnyRowsOf<T>::Byte;
  return dispatch_beside<std::remove_const_t<T>>(arg.dtype, [&]<class W>() -> AnyRowsOf<T> {
    const bool aligned = rows_of<W, std::remove_const_t<T>>(arg, cols).aligned;
    return {{static_cast<Byte*>(arg.data), arg.layout, aligned}, arg.dtype};
  });
}

// Rows of the bias, or none. Kernels with general access check at run time.
template <class T>
struct BiasOf {
  AnyRowsOf<const T> rows;
  bool rounds;  // whether numbers are rounded to T before the addition

  bool is_plain() const { return rows.bytes.data == nullptr; }
  // Adds the bias to `count` numbers of row `first + offset`, from `column` on.
  template <class Index>
  __device__ void add(Numbers<T>& y, int64_t first, int64_t offset, Index column, Index count) const {
    if (rows.bytes.data == nullptr) return;
    round_if<T>(y, rounds);
    const Numbers<T> bias = load_numbers(rows, rows.row(first, offset), column, count);
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) y.element[i] += bias.element[i];
  }
};

template <class T>
BiasOf<T> bias_of(const KernelArgs& args) {
  return {any_rows_of<const T>(args[kBias], args.cols), args.rounding.multiplied};
}

// The members of rows that plain kernels need. Kernels copy them once, as the compiler loads members of large arguments
// again after each compiler_barrier(). Without dimensions, strides[0] is 0.
template <class T>
struct PlainRows {
  static constexpr bool aligned = true;
  T* data;
  int64_t stride;

  __device__ explicit PlainRows(const RowsOf<T>& rows) : data(rows.data), stride(rows.layout.strides[0]) {}
  __device__ explicit PlainRows(const AnyRowsOf<T>& rows)
      : data(reinterpret_cast<T*>(rows.bytes.data)),
        stride(rows.bytes.layout.strides[0] / static_cast<int64_t>(sizeof(T))) {}

  __device__ T* row(int64_t first, int64_t offset = 0) const { return data + first * stride + offset * stride; }
};

template <class Access, class Rows>
using View = std::conditional_t<kIsPlain<Access>, PlainRows<typename Rows::Element>, const Rows&>;

// Returns rows as kernels with this access use them.
template <class Access, class Rows>
__device__ View<Access, Rows> view(const Rows& rows) {
  return View<Access, Rows>(rows);
}

// Loads elements of the row of `rows` that begins at `row`.
template <int kCount, class Rows, class T, class Index>
__device__ Elements<T, kCount> load(const Rows& rows, const T* row, Index column, Index count) {
  return load_elements<T, kCount>(row + column, count, rows.aligned);
}

template <class Rows, class T, class Index, int kCount>
__device__ void store(const Rows& rows, T* row, Index column, Index count, const Elements<T, kCount>& elements) {
  store_elements(row + column, elements, count, rows.aligned);
}

// Loads kPack<T> elements of any dtype.
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
__device__ void store_numbers(const PlainRows<T>& rows, T* row, Index column, Index count, const Numbers<T>& numbers) {
  store(rows, row, column, count, from_compute<T>(numbers));
}

// The weight [groups, cols], or ones without data, for packs of T.
template <class T>
struct ScaleOf {
  const void* data;
  DType dtype;
  compute_t<T> offset;
  bool aligned;

  bool is_plain() const { return data != nullptr && dtype == kDType<T> && aligned; }
};

template <class T>
ScaleOf<T> scale_of(const Weight& weight, int64_t cols) {
  return {weight.data, weight.dtype, static_cast<compute_t<T>>(weight.offset),
          reinterpret_cast<intptr_t>(weight.data) % 16 == 0 && cols % kPack<T> == 0};
}

// weight + offset of a group. Kernels call hold() before they sum a row, and numbers() afterwards. hold() loads a plain
// weight, numbers() any other one, as code for all dtypes is short of registers.
template <class T, class Access>
class GroupScale {
 public:
  struct Nothing {};
  using Held = std::conditional_t<kIsPlain<Access>, Pack<T>, Nothing>;

  // All threads of a block call it.
  __device__ GroupScale(const ScaleOf<T>& scale, int64_t group, int64_t cols) : scale_(scale) {
    if constexpr (kIsPlain<Access>) {
      scale_.data = static_cast<const T*>(scale.data) + group * cols;
    } else {
      const int64_t bytes = scale.dtype == DType::float64 ? 8 : scale.dtype == DType::float32 ? 4 : 2;
      if (threadIdx.x == 0 && threadIdx.y == 0) weight() = static_cast<const char*>(scale.data) + group * cols * bytes;
      __syncthreads();
    }
  }

  template <class Index>
  __device__ Held hold(Index column, Index count) const {
    if constexpr (kIsPlain<Access>) {
      return load_elements<T, kPack<T>>(static_cast<const T*>(scale_.data) + column, count, true);
    } else {
      return {};
    }
  }

  template <class Index>
  __device__ Numbers<T> numbers(const Held& held, Index column, Index count) const {
    if constexpr (kIsPlain<Access>) {
      Numbers<T> numbers = to_compute<T>(held);
      if (scale_.offset != 0) {
        compiler_barrier();  // makes the compiler jump over the additions, instead of predicating each
#pragma unroll
        for (int i = 0; i < kPack<T>; i++) numbers.element[i] += scale_.offset;
      }
      return numbers;
    } else {
      return load_scale<T>(scale_.data == nullptr ? nullptr : weight(), scale_.dtype, scale_.offset, column, count,
                           scale_.aligned);
    }
  }

 private:
  std::conditional_t<kIsPlain<Access>, ScaleOf<T>, const ScaleOf<T>&> scale_;  // with plain access, that of the group

  // Holds the group's row in shared memory, as code for all dtypes is short of registers.
  static __device__ const char* volatile& weight() {
    __shared__ const char* volatile weight;
    return weight;
  }
};

}  // namespace normops::cuda
