// Iterates over rows of tensors, by groups of the weight.
#include "row_access.inl"
#include "row_config.h"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The rows of a tensor, up to kBackwardTile of one group at a time. Row r belongs to group r % groups, so the rows of a
// group are `groups` rows apart.
class GroupedRows {
 public:
  // Avoids inlining, as each operator has several of them.
  [[gnu::noinline]] GroupedRows(const RowsArg& rows, int64_t groups, int64_t row)
      : tensor_(rows), groups_(groups), row_(rows, row * groups, groups), group_(rows, 0) {}

  // Advances to the next `count` rows of all groups. The first call of next_group() selects `group`.
  void next_rows(int count, int64_t group) {
    if (groups_ > 1) next_rows_of_groups(count, group);
  }

  void next_group() {
    if (groups_ > 1) offset_ = group_.next() - static_cast<char*>(tensor_.data);
  }

  // Returns row r of the current group; to be called for consecutive r.
  char* next(int r) { return groups_ == 1 ? row_.next() : rows_[r] + offset_; }

 private:
  [[gnu::noinline]] void next_rows_of_groups(int count, int64_t group) {
    for (int r = 0; r < count; r++) rows_[r] = row_.next();
    group_ = RowIterator(tensor_, group);
  }

  const RowsArg& tensor_;
  int64_t groups_;
  RowIterator row_, group_;
  char* rows_[kBackwardTile];  // of group 0
  int64_t offset_ = 0;         // from group 0 to the current group
};

// Rows of all tensors of an operator, with the functions of GroupedRows.
template <class RowOp>
class GroupedTensors {
 public:
  GroupedTensors(const CpuArgs& args, int64_t row)
      : GroupedTensors(args, row, std::make_integer_sequence<int, std::size(RowOp::kTensors)>()) {}

  void next_rows(int count, int64_t group) {
    for (GroupedRows& rows : rows_) rows.next_rows(count, group);
  }
  void next_group() {
    for (GroupedRows& rows : rows_) rows.next_group();
  }

  // Row r of each tensor: row<kInput, const T>() is that of the input, to be called once; null if absent.
  struct Next {
    GroupedTensors& tensors;
    int r;

    template <TensorIndex tensor, class T>
    NORMOPS_INLINE T* row() const {
      constexpr int kPlace = place_of<RowOp>(tensor);
      if constexpr (kPlace < 0) {
        return nullptr;
      } else {
        return tensors.has_[kPlace] ? reinterpret_cast<T*>(tensors.rows_[kPlace].next(r)) : nullptr;
      }
    }
  };
  Next next(int r) { return {*this, r}; }

 private:
  template <int... i>
  GroupedTensors(const CpuArgs& args, int64_t row, std::integer_sequence<int, i...>)
      : has_{args.has(RowOp::kTensors[i])...},
        rows_{GroupedRows(args[RowOp::kTensors[i]], args.weight.groups, row)...} {}

  bool has_[std::size(RowOp::kTensors)];
  GroupedRows rows_[std::size(RowOp::kTensors)];
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
