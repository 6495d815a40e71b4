// Division of work among threads, in particular of the rows of a backward. No torch header.
#pragma once
#include <algorithm>
#include <cstdint>

#include "leaves.h"

namespace normops::cpu {

// The minimum number of elements per thread: waking a second thread costs about as much as processing these.
constexpr int64_t kGrainElements = 16384;

inline int64_t grain(int64_t elements_each) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_each));
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the number of parts into which `threads` threads divide the range.
inline int64_t part_count(int64_t length, int64_t grain, int64_t threads) {
  return length <= grain ? 1 : std::min(threads, divide_up(length, grain));
}

// Returns where a part of [begin, end) begins. Sizes of parts differ by at most one.
inline int64_t part_begin(int64_t begin, int64_t end, int64_t part, int64_t parts) {
  return begin + (end - begin) * part / parts;
}

// Divides the rows of a backward into strips: all rows of some adjacent groups. The units of a strip are leaves of
// these groups, or rows if none are summed. Units and strips are consecutive. The division depends only on the numbers
// of rows, columns and groups, so that results do not depend on the number of threads.
class Division {
 public:
  Division(int64_t rows, int64_t cols, int64_t groups, bool sums_rows)
      : rows_(rows / groups),
        groups_(groups),
        sums_rows_(sums_rows),
        rows_per_unit_(sums_rows ? leaf_rows(rows / groups, cols) : 1),
        groups_per_strip_(even_part(groups, cpu::grain(std::min(leaf_rows(rows_, cols), rows_) * cols))),
        units_per_strip_(divide_up(rows_, rows_per_unit_)),
        cols_(cols) {}

  int64_t rows_per_unit() const { return rows_per_unit_; }
  int64_t rows_per_leaf() const { return sums_rows_ ? rows_per_unit_ : rows_; }
  int64_t groups_per_strip() const { return groups_per_strip_; }
  int64_t units_per_strip() const { return units_per_strip_; }
  int64_t strips() const { return divide_up(groups_, groups_per_strip_); }
  int64_t units() const { return strips() * units_per_strip_; }
  // Returns the minimum number of units per thread.
  int64_t grain() const { return cpu::grain(std::min(rows_per_unit_, rows_) * groups_per_strip_ * cols_); }

  // Calls visit(region) for units [begin, end), strip by strip.
  template <class Visit>
  void each_region(int64_t begin, int64_t end, const Visit& visit) const {
    while (begin < end) {
      const int64_t strip = begin / units_per_strip_, first = begin % units_per_strip_,
                    last = std::min(units_per_strip_, first + end - begin), row = first * rows_per_unit_,
                    group = strip * groups_per_strip_;
      visit(Region{row, std::min(last * rows_per_unit_, rows_) - row, group,
                   std::min(groups_per_strip_, groups_ - group)});
      begin += last - first;
    }
  }

  // Calls visit(region) for a part of all units.
  template <class Visit>
  void each_region_of_part(int64_t part, int64_t parts, const Visit& visit) const {
    each_region(part_begin(0, units(), part, parts), part_begin(0, units(), part + 1, parts), visit);
  }

  bool is_whole_strip(const Region& region) const { return region.rows == rows_; }
  bool ends_strip(const Region& region) const { return region.row + region.rows == rows_; }

 private:
  // Returns eight rows, or more if rows are narrow and many: each leaf has a fixed cost, but longer leaves of few rows
  // raise the bound on the rounding error.
  static int64_t leaf_rows(int64_t rows, int64_t cols) {
    constexpr int64_t kLeast = 8, kMost = 64;
    int64_t result = kLeast;
    while (result < kMost && 2 * result * cols <= kGrainElements && 4 * result * result <= rows) result *= 2;
    return result;
  }

  // Returns the size of even parts of at most `most`: the last one is smaller by less than the number of parts.
  static int64_t even_part(int64_t length, int64_t most) { return divide_up(length, divide_up(length, most)); }

  int64_t rows_, groups_;  // rows of each group
  bool sums_rows_;
  int64_t rows_per_unit_, groups_per_strip_, units_per_strip_;
  int64_t cols_;
};

}  // namespace normops::cpu
