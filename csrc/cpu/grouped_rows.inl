// Rows of tensors, group by group of the weight.
#include "row_config.h"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The rows of a tensor, up to kBackwardTile of one group at a time. As row r is of group r % groups, the rows of a
// group lie `groups` rows apart.
class GroupedRows {
 public:
  // Not inlined, as each Source has several of them.
  [[gnu::noinline]] GroupedRows(const RowsArg& rows, int64_t groups, int64_t row)
      : tensor_(rows), groups_(groups), row_(rows, row * groups, groups), group_(rows, 0) {}

  // Goes on to the next `count` rows of all groups. The first call of next_group() will be for `group`.
  void next_rows(int count, int64_t group) {
    if (groups_ > 1) next_rows_of_groups(count, group);
  }

  void next_group() {
    if (groups_ > 1) offset_ = group_.next() - static_cast<char*>(tensor_.data);
  }

  // Row r of the current group; to be called for one after another.
  template <class T>
  T* next(int r) {
    return reinterpret_cast<T*>(groups_ == 1 ? row_.next() : rows_[r] + offset_);
  }

 private:
  [[gnu::noinline]] void next_rows_of_groups(int count, int64_t group) {
    for (int r = 0; r < count; r++) rows_[r] = row_.next();
    group_ = RowIterator(tensor_, group);
  }

  const RowsArg& tensor_;
  int64_t groups_;
  RowIterator row_, group_;
  char* rows_[kBackwardTile];  // of group 0
  int64_t offset_ = 0;         // from there to the current group
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
