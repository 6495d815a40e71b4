// How kernels walk over rows. No torch header. The code is shared by the kernels of all instruction sets, so it is
// compiled for every CPU of the architecture.
#pragma once
#include <cstdint>

#include "../kernel_args.h"

namespace normops::cpu {

// Rows in runs: those of a run lie at equal distances, and so do the runs. How many rows a run has
// is told by StrideRuns, which several tensors share.
struct StridedRows {
  char* row;       // the current one
  int64_t stride;  // to the next one of the run, in bytes
  int64_t jump;    // what has to be added behind the last one of a run

  template <class T>
  T* at() const {
    return reinterpret_cast<T*>(row);
  }
  void next() { row += stride; }
  void next_run() { row += jump; }
};

// Walks over rows without a division per row: from `row` on, over all of them or over each `step`-th one. `step` is the
// size of some of the tensor's last dimensions together, as the number of a weight's groups is, and `row` is a multiple
// of it.
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

  // The current row; moves on to the next one.
  char* next() {
    char* const row = data_;
    data_ += stride_;
    if (--left_ == 0) carry();
    return row;
  }

  // The rows of the innermost dimension, which lie at equal distances, or INT64_MAX if there is no other; and those
  // that are left of it.
  int64_t run() const { return last_ > 0 ? size_ : INT64_MAX; }
  int64_t run_left() const { return left_; }

  // How many rows from the current one on lie in runs at equal distances.
  int64_t strided_left() const {
    return last_ > 0 ? left_ + (layout_->sizes[last_ - 1] - index_[last_ - 1] - 1) * size_ : left_;
  }

  // The next `count` rows, at most strided_left(); moves on behind them.
  [[gnu::noinline]] StridedRows take_strided(int64_t count) {
    const StridedRows rows = {data_, stride_, last_ > 0 ? layout_->strides[last_ - 1] - size_ * stride_ : 0};
    if (count < left_) {
      data_ += count * stride_;
      left_ -= count;
    } else if (last_ > 0) {
      count += size_ - left_;  // from the beginning of the run on
      data_ -= (size_ - left_) * stride_;
      advance_with_carry(count);
    }
    return rows;
  }

 private:
  // Goes on by `count` rows, from the first one of an innermost dimension on.
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

  char* data_;
  int64_t stride_ = 0;  // of a step along the innermost dimension that steps go along
  int64_t size_ = 0;    // the steps in that dimension
  int64_t left_ = 2;    // those of them that are left; a layout without dimensions has one row, and never carries
  const RowLayout* layout_;
  int last_;  // that dimension
  int64_t index_[RowLayout::kMaxDims] = {};
};

// Rows of several tensors that are walked over together: `count` of them, in runs of `size` rows.
struct StrideRuns {
  int64_t size;
  int64_t left;  // of the first one, the rows from the current one on
  int64_t count;
};

}  // namespace normops::cpu
