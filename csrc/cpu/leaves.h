// The order in which a backward sums gradients of parameters over rows. No torch header.
//
// A leaf is a few consecutive rows of a group, whose terms are summed one after another. The sums of leaves are added
// along a binary tree: leaves 0 and 1, leaves 2 and 3, then these two sums, and so on. Consecutive leaves leave at most
// two sums per level of the tree.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace normops::cpu {

// Rows [row, row + rows) of each of the groups [group, group + groups).
struct Region {
  int64_t row, rows;
  int64_t group, groups;
};

// Returns how often the last two sums are added after a sum of `leaves` leaves (a power of two) that ends at leaf
// `end`. The first leaf is `begin`.
inline int merges_after(int64_t begin, int64_t end, int64_t leaves = 1) {
  int count = 0;
  for (int64_t size = 2 * leaves; end % size == 0 && end - size >= begin; size *= 2) count++;
  return count;
}

// Calls visit(end, leaves) for the sums that remain of leaves [begin, end), in order.
template <class Visit>
void each_sum(int64_t begin, int64_t end, const Visit& visit) {
  while (begin < end) {
    auto size = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(end - begin)));
    if (begin > 0) size = std::min(size, begin & -begin);
    begin += size;
    visit(begin, size);
  }
}

inline int sum_count(int64_t begin, int64_t end) {
  int count = 0;
  each_sum(begin, end, [&](int64_t, int64_t) { count++; });
  return count;
}

// The maximum number of sums at a time: kMostSums of any number of consecutive leaves, most_sums() of the given one.
constexpr int kMostSums = 2 * 63;
inline int64_t most_sums(int64_t leaves) { return 2 * std::bit_width(static_cast<uint64_t>(leaves)) - 1; }

}  // namespace normops::cpu
