// Splits the rows of a call among threads.
#pragma once
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "kernels.h"
#include "parallel.h"

namespace normops::cpu {

// The size of a Scratch's stack memory, in doubles.
constexpr int64_t kStackNumbers = 2048;

// Returns how many doubles, in whole cache lines, hold `count` numbers of the compute type.
inline int64_t scratch_numbers(DType dtype, int64_t count) {
  constexpr int64_t kLine = 8;
  const int64_t numbers = compute_dtype(dtype) == DType::float64 ? count : (count + 1) / 2;
  return (numbers + kLine - 1) / kLine * kLine;
}

// The memory of each part's Scratch, unless the stack has room for it. It is allocated before the threads begin, as a
// thread of a parallel loop cannot report a failed allocation.
class PartsMemory {
 public:
  PartsMemory(DType dtype, int64_t count, int64_t parts) : numbers_(scratch_numbers(dtype, count)) {
    // Uses torch's allocator, whose error reports the requested size.
    if (numbers_ > kStackNumbers) memory_ = c10::GetCPUAllocator()->allocate(parts * numbers_ * sizeof(double));
  }

  // Returns the memory of a part's Scratch, or null if it is on the stack.
  double* of(int64_t part) const noexcept {
    return memory_ ? static_cast<double*>(memory_.get()) + part * numbers_ : nullptr;
  }

 private:
  int64_t numbers_;
  c10::DataPtr memory_;
};

// Uninitialised memory for numbers of the compute type; small amounts are on the stack.
class Scratch {
 public:
  Scratch(const PartsMemory& memory, int64_t part) noexcept : data_(memory.of(part)) {
    if (data_ == nullptr) data_ = small_;
  }
  Scratch(const Scratch&) = delete;
  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }

 private:
  double* data_;
  alignas(64) double small_[kStackNumbers];
};

// A Scratch for `count` numbers, for use outside of parallel loops.
class OwnScratch : PartsMemory, public Scratch {
 public:
  OwnScratch(DType dtype, int64_t count) : PartsMemory(dtype, count, 1), Scratch(*this, 0) {}
};

// Splits the columns of all groups among the threads, in whole blocks: calls function(group, begin, end) for columns
// [begin, end) of a group.
template <class Function>
void parallel_for_columns(int64_t groups, int64_t cols, int64_t grain_columns, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t, int64_t>);
  const int64_t blocks = (cols + kLongestBlock - 1) / kLongestBlock;
  parallel_for(0, groups * blocks, std::max<int64_t>(1, grain_columns / kLongestBlock),
               [&](int64_t begin, int64_t end) noexcept {
                 while (begin < end) {
                   const int64_t group = begin / blocks, first = begin % blocks,
                                 last = std::min(blocks, first + end - begin);
                   function(group, first * kLongestBlock, std::min(last * kLongestBlock, cols));
                   begin += last - first;
                 }
               });
}

// Calls function(part, args, own, first, last) for the parts of [0, end). Each part has row scratch in its arguments,
// and `own_count` more numbers.
template <class Function>
void parallel_over_rows(const CpuArgs& args, int64_t own_count, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, CpuArgs&, Scratch&, int64_t, int64_t>);
  const int64_t parts = part_count(end, grain), row_count = scratch_rows(args) * padded_cols(args.dtype(), args.cols);
  const PartsMemory own_memory(args.dtype(), own_count, parts), row_memory(args.dtype(), row_count, parts);
  parallel_for_parts(0, end, grain, [&](int64_t part, int64_t first, int64_t last) noexcept {
    Scratch own(own_memory, part), row_scratch(row_memory, part);
    CpuArgs args_of_part = args;
    args_of_part.row_scratch = row_scratch.data();
    function(part, args_of_part, own, first, last);
  });
}

// Runs the kernel of a forward. `scale` is weight + its offset: scale.own_count() is the scratch that a part needs for
// it, and scale.converted(own, group, groups) returns the scale of some groups, in that scratch or elsewhere.
template <class Scale>
void run_forward(ForwardKernel kernel, const CpuArgs& args, const Scale& scale) {
  const int64_t groups = args.weight.groups;
  parallel_over_rows(args, scale.own_count(), args.rows, grain(args.cols),
                     [&](int64_t, CpuArgs& args, Scratch& own, int64_t begin, int64_t end) noexcept {
                       args.scale = scale.converted(own, 0, groups);
                       kernel(args, begin, end);
                     });
}

}  // namespace normops::cpu
