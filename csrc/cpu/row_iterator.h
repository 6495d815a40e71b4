// How kernels walk over rows. No torch header. The code is shared by the kernels of all instruction sets, so it is
// compiled for the baseline.
#pragma once
#include <cstdint>

#include "../rows.h"

namespace normops::cpu {

// Rows at equal distances.
template <class T>
struct EvenRows {
  T* row;          // the current one
  int64_t stride;  // in elements

  void next() { row += stride; }
};

// Walks over rows without a division per row: from `row` on, over all of them or over each `step`-th one. `step` is the
// size of some of the tensor's last dimensions together, as the number of a weight's groups is, and `row` is a multiple
// of it. Up to kAtOnce rows are found at once.
template <class T, int kAtOnce = 1>
class RowIterator {
 public:
  RowIterator(T* data, const RowLayout& layout, int64_t row, int64_t step = 1)
      : data_(data), layout_(&layout), last_(layout.dims - 1) {
    row /= step;
    for (; last_ >= 0 && step > 1 && step >= layout.sizes[last_]; last_--) step /= layout.sizes[last_];
    if (last_ < 0) return;
    stride_ = layout.strides[last_] * step;
    size_ = layout.sizes[last_] / step;
    int64_t index = row;
    if (last_ > 0) {
      index = row % size_;
      row /= size_;
      for (int d = last_ - 1; d >= 0; d--) {
        index_[d] = row % layout.sizes[d];
        row /= layout.sizes[d];
        data_ += index_[d] * layout.strides[d];
      }
    }
    data_ += index * stride_;
    left_ = size_ - index;
    for (int r = 0; r < kAtOnce; r++) offsets_[r] = r * stride_ * static_cast<int64_t>(sizeof(T));
  }

  // The current row; moves on to the next one.
  T* next() {
    T* const row = data_;
    data_ += stride_;
    if (--left_ == 0) carry();
    return row;
  }

  // How many rows from the current one on lie at equal distances.
  int64_t even_count() const { return left_; }

  // The next `count` rows, at most even_count(); moves on behind them.
  EvenRows<T> next_even(int64_t count) {
    const EvenRows<T> rows = {data_, stride_};
    data_ += count * stride_;
    left_ -= count;
    if (left_ == 0) carry();
    return rows;
  }

  // The next kRows rows; moves on behind them.
  template <int kRows>
  void next(T* (&rows)[kRows]) {
    static_assert(kRows <= kAtOnce);
    if (left_ <= kRows) return next_one_by_one(rows, kRows);
    for (int r = 0; r < kRows; r++) rows[r] = reinterpret_cast<T*>(reinterpret_cast<intptr_t>(data_) + offsets_[r]);
    data_ += kRows * stride_;
    left_ -= kRows;
  }

 private:
  [[gnu::noinline]] void next_one_by_one(T** rows, int count) {
    for (int r = 0; r < count; r++) rows[r] = next();
  }

  // Called behind the last row of the innermost dimension: goes back to its first row, and on by one in the dimensions
  // around it.
  [[gnu::noinline]] void carry() {
    left_ = size_;
    data_ -= left_ * stride_;
    for (int d = last_ - 1; d >= 0; d--) {
      data_ += layout_->strides[d];
      if (++index_[d] < layout_->sizes[d]) return;
      data_ -= layout_->sizes[d] * layout_->strides[d];
      index_[d] = 0;
    }
  }

  T* data_;
  int64_t stride_ = 0;  // of a step along the innermost dimension that steps go along
  int64_t size_ = 0;    // the steps in that dimension
  int64_t left_ = 2;    // those of them that are left; a layout without dimensions has one row, and never carries
  const RowLayout* layout_;
  int last_;                       // that dimension
  int64_t offsets_[kAtOnce] = {};  // of the next rows from the current one, in bytes: one addition makes them addresses
  int64_t index_[RowLayout::kMaxDims] = {};
};

}  // namespace normops::cpu
