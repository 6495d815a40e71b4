// Iterates over the rows of strided tensors. No torch header. The kernels of all instruction sets share this code, so
// it is compiled for every CPU of the architecture.
#pragma once
#include <cstdint>

#include "../kernel_args.h"

namespace normops::cpu {

// Strided rows in runs: a fixed stride within each run, and a fixed jump between runs. StrideRuns, which several
// tensors share, has the number of rows in a run.
struct StridedRows {
  char* row;       // the current one
  int64_t stride;  // to the next one of the run, in bytes
  int64_t jump;    // is added after the last row of a run

  template <class T>
  T* at() const {
    return reinterpret_cast<T*>(row);
  }
  void next() { row += stride; }
  void next_run() { row += jump; }
};

// Iterates over every `step`-th row from `row` on, without a division per row. `step` is the product of some of the
// tensor's last sizes, like the number of a weight's groups, and `row` is a multiple of it.
class RowIterator {
 public:
  [[gnu::noinline]] RowIterator(const RowsArg& rows, int64_t row, int64_t step = 1)
      : data_(static_cast<char*>(rows.data)), layout_(&rows.layout), last_(layout_->dims - 1) {
    const RowLayout& layout = *layout_;
    row /= step;
    for (; last_ >= 0 && step > 1 && step >= layout.sizes[last_]; last_--) step /= layout.sizes[last_];
    if (last_ < 0) return;
    stride_ = layout.strides[last_] * step;
    size_ = layout.sizes[last_] / step;
    if (last_ > 0) {
      advance_with_carry(row);
    } else {
      data_ += row * stride_;
      left_ = size_ - row;
    }
  }

  // Returns the current row, and advances to the next one.
  char* next() {
    char* const row = data_;
    data_ += stride_;
    if (--left_ == 0) carry();
    return row;
  }

  // run() is the number of rows in the innermost dimension, which have a fixed stride, or INT64_MAX if it is the only
  // one. run_left() is the number of rows that remain in it.
  int64_t run() const { return last_ > 0 ? size_ : INT64_MAX; }
  int64_t run_left() const { return left_; }

  // Returns the number of rows, from the current one on, that are in runs of fixed stride.
  int64_t strided_left() const {
    return last_ > 0 ? left_ + (layout_->sizes[last_ - 1] - index_[last_ - 1] - 1) * size_ : left_;
  }

  // Returns the next `count` rows, at most strided_left(), and advances past them.
  [[gnu::noinline]] StridedRows take_strided(int64_t count) {
    const StridedRows rows = {data_, stride_, last_ > 0 ? layout_->strides[last_ - 1] - size_ * stride_ : 0};
    if (count < left_) {
      data_ += count * stride_;
      left_ -= count;
    } else if (last_ > 0) {
      count += size_ - left_;  // from the beginning of the run
      data_ -= (size_ - left_) * stride_;
      advance_with_carry(count);
    }
    return rows;
  }

 private:
  // Advances by `count` rows from the first row of an innermost dimension.
  [[gnu::noinline]] void advance_with_carry(int64_t count) {
    data_ += count % size_ * stride_;
    left_ = size_ - count % size_;
    count /= size_;
    for (int d = last_ - 1; d >= 0 && count > 0; d--) {
      const int64_t index = (index_[d] + count) % layout_->sizes[d];
      count = (index_[d] + count) / layout_->sizes[d];
      data_ += (index - index_[d]) * layout_->strides[d];
      index_[d] = index;
    }
  }

  // Called after the last row of the innermost dimension: returns to its first row, and increments the outer
  // dimensions.
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

  char* data_;
  int64_t stride_ = 0;  // of a step in dimension last_
  int64_t size_ = 0;    // the steps in that dimension
  int64_t left_ = 2;    // the steps that remain; a layout without dimensions has one row, and never carries
  const RowLayout* layout_;
  int last_;  // the innermost dimension that steps advance in
  int64_t index_[RowLayout::kMaxDims] = {};
};

// An iteration over rows of several tensors together: `count` rows, in runs of `size` rows.
struct StrideRuns {
  int64_t size;
  int64_t left;  // rows of the first run, from the current one on
  int64_t count;
};

}  // namespace normops::cpu
