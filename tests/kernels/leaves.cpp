// Sums leaves like the parts of a backward, for any number of parts, with the text of the merges as each sum.
// Compares the result with the binary tree over all leaves.
#include "leaves.h"

#include <cstdio>
#include <string>
#include <vector>

#include "division.h"

namespace {

using namespace normops::cpu;

std::string tree(int64_t first, int64_t size, int64_t leaves) {
  if (size == 1) return std::to_string(first);
  const int64_t half = size / 2;
  if (first + half >= leaves) return tree(first, half, leaves);
  return "(" + tree(first, half, leaves) + "+" + tree(first + half, half, leaves) + ")";
}

void add_last(std::vector<std::string>& sums, int merges) {
  for (; merges > 0; merges--) {
    const std::string last = sums.back();
    sums.pop_back();
    sums.back() = "(" + sums.back() + "+" + last + ")";
  }
}

// Returns the sum over all parts of [0, leaves); empty if a part has more sums than it has memory for.
std::string summed(int64_t leaves, int64_t parts) {
  std::vector<std::string> all;
  for (int64_t part = 0; part < parts; part++) {
    const int64_t begin = part_begin(0, leaves, part, parts), end = part_begin(0, leaves, part + 1, parts);
    std::vector<std::string> sums;
    for (int64_t leaf = begin; leaf < end; leaf++) {
      if (static_cast<int64_t>(sums.size()) != sum_count(begin, leaf)) return "";
      sums.push_back(std::to_string(leaf));
      if (static_cast<int64_t>(sums.size()) > most_sums(end - begin)) return "";
      add_last(sums, merges_after(begin, leaf + 1));
    }
    size_t next = 0;
    each_sum(begin, end, [&](int64_t end, int64_t size) {
      all.push_back(sums[next++]);
      add_last(all, merges_after(0, end, size));
    });
    if (next != sums.size()) return "";
  }
  add_last(all, static_cast<int>(all.size()) - 1);
  return all[0];
}

}  // namespace

int main() {
  for (int64_t leaves = 1; leaves <= 130; leaves++) {
    const std::string expected = tree(0, 256, leaves);
    for (int64_t parts = 1; parts <= leaves; parts++) {
      if (summed(leaves, parts) == expected) continue;
      std::printf("%d leaves in %d parts are not the tree\n", static_cast<int>(leaves), static_cast<int>(parts));
    }
  }
}
