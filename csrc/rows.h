// Where the rows of a tensor lie in memory. No torch header, so that kernels can include it.
#pragma once
#include <cstdint>

namespace normops {

// The dimensions before the normalized ones, outermost first, merged as far as their strides allow: a contiguous tensor
// has one, a slice of a fused QKV projection two. Strides count elements; an expanded dimension has stride 0.
struct RowLayout {
  static constexpr int kMaxDims = 8;
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

// Walks over consecutive rows without a division per row.
template <class T>
class RowIterator {
 public:
  RowIterator(T* data, const RowLayout& layout, int64_t row) : data_(data), layout_(layout) {
    for (int d = layout.dims - 1; d >= 0; d--) {
      index_[d] = row % layout.sizes[d];
      row /= layout.sizes[d];
      data_ += index_[d] * layout.strides[d];
    }
    if (layout.dims > 0) {
      stride_ = layout.strides[layout.dims - 1];
      left_ = layout.sizes[layout.dims - 1] - index_[layout.dims - 1];
    }
  }

  // The current row; moves on to the next one.
  T* next() {
    T* const row = data_;
    data_ += stride_;
    if (--left_ == 0) carry();
    return row;
  }

 private:
  // Behind the last row of the innermost dimension: back to its first, one on in the dimensions around it.
  [[gnu::noinline]] void carry() {
    int d = layout_.dims - 1;
    left_ = layout_.sizes[d];
    data_ -= left_ * stride_;
    for (d--; d >= 0; d--) {
      data_ += layout_.strides[d];
      if (++index_[d] < layout_.sizes[d]) return;
      data_ -= layout_.sizes[d] * layout_.strides[d];
      index_[d] = 0;
    }
  }

  T* data_;
  int64_t stride_ = 0;  // of the innermost dimension
  int64_t left_ = 2;    // rows to go in it; without dimensions there is one row, and nothing to carry
  const RowLayout& layout_;
  int64_t index_[RowLayout::kMaxDims] = {};
};

}  // namespace normops
