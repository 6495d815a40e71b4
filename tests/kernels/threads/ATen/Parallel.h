// The part of PyTorch that csrc/cpu/parallel.h needs: four threads, unless the program sets another number.
#pragma once

namespace at {

inline int threads = 4;
inline thread_local bool is_in_region = false;  // set by the program

inline int get_num_threads() { return threads; }
inline bool in_parallel_region() { return is_in_region; }

namespace internal {
inline void lazy_init_num_threads() {}
}  // namespace internal

}  // namespace at
