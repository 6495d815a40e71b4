// Loops that PyTorch's threads share. at::parallel_for is an OpenMP pragma in a header, which clang turns into calls of
// LLVM's runtime: a second one, with threads of its own, beside the one that PyTorch has loaded. This calls that one,
// whichever compiler builds normops.
#pragma once
#include <ATen/Config.h>
#include <ATen/Parallel.h>

#include <type_traits>

#include "division.h"

static_assert(AT_PARALLEL_OPENMP, "expected a PyTorch whose threads are OpenMP's");

extern "C" {  // of GCC's runtime; LLVM's and Intel's have them, too
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace normops::cpu {

// How many parts parallel_for shares so much work out in.
inline int64_t part_count(int64_t length, int64_t grain) {
  return at::in_parallel_region() ? 1 : part_count(length, grain, at::get_num_threads());
}

// Calls function(part, first, last) for the parts of [begin, end), which differ by one at most. The function must not
// throw, as OpenMP would terminate the program: it takes its memory before.
template <class Function>
void parallel_for_parts(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t, int64_t>);
  if (begin >= end) return;
  at::internal::lazy_init_num_threads();
  const int64_t parts = part_count(end - begin, grain);
  if (parts == 1) {
    function(0, begin, end);
    return;
  }
  struct Loop {
    int64_t begin, end, parts;
    const Function& function;
  } loop = {begin, end, parts, function};
  const auto run_share = [](void* data) noexcept {
    const auto& [begin, end, parts, function] = *static_cast<const Loop*>(data);
    // There may be fewer threads than were asked for.
    for (int64_t part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) {
      function(part, part_begin(begin, end, part, parts), part_begin(begin, end, part + 1, parts));
    }
  };
  // Not of so many threads: the runtime would end the others, and start them again when they are needed.
  GOMP_parallel(run_share, &loop, 0, 0);
}

// The same with function(first, last).
template <class Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t>);
  parallel_for_parts(begin, end, grain, [&](int64_t, int64_t first, int64_t last) noexcept { function(first, last); });
}

}  // namespace normops::cpu
