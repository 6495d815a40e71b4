// Loops on PyTorch's threads. at::parallel_for is an OpenMP pragma in a header, which clang compiles to calls of LLVM's
// runtime: a second runtime with separate threads, in addition to PyTorch's. These loops call PyTorch's runtime,
// independently of the compiler.
#pragma once
#include <ATen/Config.h>
#include <ATen/Parallel.h>

#include <type_traits>

#include "division.h"

static_assert(AT_PARALLEL_OPENMP, "expected a PyTorch whose threads are OpenMP's");

extern "C" {  // exported by GCC's runtime, and by LLVM's and Intel's
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace normops::cpu {

// Returns the number of parts into which parallel_for divides the range.
inline int64_t part_count(int64_t length, int64_t grain) {
  return at::in_parallel_region() ? 1 : part_count(length, grain, at::get_num_threads());
}

// Calls function(part, first, last) for the parts of [begin, end), whose sizes differ by at most one. The function must
// not throw, as OpenMP would terminate the program: callers allocate its memory before.
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
    // The runtime may provide fewer threads than requested.
    for (int64_t part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) {
      function(part, part_begin(begin, end, part, parts), part_begin(begin, end, part + 1, parts));
    }
  };
  // Requests all threads instead of `parts`: the runtime would end the others, and start them again later.
  GOMP_parallel(run_share, &loop, 0, 0);
}

// Calls function(first, last) for the parts of [begin, end).
template <class Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t>);
  parallel_for_parts(begin, end, grain, [&](int64_t, int64_t first, int64_t last) noexcept { function(first, last); });
}

}  // namespace normops::cpu
