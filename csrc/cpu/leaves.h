// In which order a backward sums the gradients of parameters over rows. No torch header.
//
// A leaf is a few rows of a group. Their terms are summed one after another, and the sums of the leaves along a binary
// tree: those of leaves 0 and 1, of 2 and 3, then these two sums, and so on. Leaves that follow one another leave no
// more than two sums for each level of the tree.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace normops::cpu {

// `rows` rows, from `row` on, of each of `groups` groups, from `group` on.
struct Region {
  int64_t row, rows;
  int64_t group, groups;
};

// How often the last two sums are added when one is complete that ends with leaf `end`, and is of so many leaves
// itself, where the first leaf was `begin`. All of these numbers of leaves are powers of two.
inline int additions_behind(int64_t begin, int64_t end, int64_t leaves = 1) {
  int count = 0;
  for (int64_t size = 2 * leaves; end % size == 0 && end - size >= begin; size *= 2) count++;
  return count;
}

// Calls visit(end, leaves) for the sums that then are left of the leaves [begin, end), from the first one on.
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

// The most sums that there are at a time, of so many leaves that follow one another, and of any number of them.
constexpr int kMostSums = 2 * 63;
inline int64_t most_sums(int64_t leaves) { return 2 * std::bit_width(static_cast<uint64_t>(leaves)) - 1; }

}  // namespace normops::cpu
