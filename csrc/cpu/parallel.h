// Loops that PyTorch's threads share. at::parallel_for is an OpenMP pragma in a header, which clang turns into calls of
// LLVM's runtime: a second one, with threads of its own, beside the one that PyTorch has loaded. This calls that one,
// whichever compiler builds normops.
#pragma once
#include <ATen/Config.h>
#include <ATen/Parallel.h>

#include <algorithm>

static_assert(AT_PARALLEL_OPENMP, "expected a PyTorch whose threads are OpenMP's");

extern "C" {  // of GCC's runtime; LLVM's and Intel's have them, too
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace normops::cpu {

// Calls function(first, last) for parts of [begin, end), of at least `grain` each if there are several. The function
// must not throw.
template <class Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  if (begin >= end) return;
  at::internal::lazy_init_num_threads();
  if (end - begin <= grain || end - begin == 1 || at::in_parallel_region() || at::get_num_threads() == 1) {
    function(begin, end);
    return;
  }
  struct Loop {
    int64_t begin, end, grain;
    const Function& function;
  } loop = {begin, end, grain, function};
  const auto run_share = [](void* data) {
    const auto& [begin, end, grain, function] = *static_cast<const Loop*>(data);
    const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t parts = std::min<int64_t>(omp_get_num_threads(), divide_up(end - begin, grain));
    const int64_t length = divide_up(end - begin, parts);
    const int64_t first = begin + omp_get_thread_num() * length;
    if (first < end) function(first, std::min(first + length, end));
  };
  GOMP_parallel(run_share, &loop, 0, 0);
}

}  // namespace normops::cpu
