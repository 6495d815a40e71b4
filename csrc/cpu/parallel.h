// Loops that PyTorch's threads share. at::parallel_for is an OpenMP pragma in a header, which clang turns into calls of
// LLVM's runtime: a second one, with threads of its own, beside the one that PyTorch has loaded. This calls that one,
// whichever compiler builds normops.
#pragma once
#include <ATen/Config.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

static_assert(AT_PARALLEL_OPENMP, "expected a PyTorch whose threads are OpenMP's");

extern "C" {  // of GCC's runtime; LLVM's and Intel's have them, too
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace normops::cpu {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The threads that parallel_for shares so much work among.
inline int64_t thread_count(int64_t length, int64_t grain) {
  if (length <= grain || length <= 1 || at::in_parallel_region()) return 1;
  return std::min<int64_t>(at::get_num_threads(), divide_up(length, grain));
}

// Calls function(thread, first, last) for parts of [begin, end), of at least `grain` each if there are several;
// `thread` is below thread_count(end - begin, grain), and another one in each call. The function must not throw, as
// OpenMP would terminate the program: it takes its memory before.
template <class Function>
void parallel_for_threads(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t, int64_t>);
  if (begin >= end) return;
  at::internal::lazy_init_num_threads();
  const int64_t threads = thread_count(end - begin, grain);
  if (threads == 1) {
    function(0, begin, end);
    return;
  }
  struct Loop {
    int64_t begin, end, threads;
    const Function& function;
  } loop = {begin, end, threads, function};
  const auto run_share = [](void* data) noexcept {
    const auto& [begin, end, threads, function] = *static_cast<const Loop*>(data);
    const int64_t parts = std::min<int64_t>(omp_get_num_threads(), threads), thread = omp_get_thread_num();
    const int64_t length = divide_up(end - begin, parts);
    const int64_t first = begin + thread * length;
    if (first < end) function(thread, first, std::min(first + length, end));
  };
  // Not of `threads` threads: the runtime would end the others, and start them again when they are needed.
  GOMP_parallel(run_share, &loop, 0, 0);
}

// The same with function(first, last).
template <class Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static_assert(std::is_nothrow_invocable_v<const Function&, int64_t, int64_t>);
  parallel_for_threads(begin, end, grain,
                       [&](int64_t, int64_t first, int64_t last) noexcept { function(first, last); });
}

}  // namespace normops::cpu
