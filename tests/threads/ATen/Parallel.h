// What csrc/cpu/parallel.h needs of PyTorch: four threads.
#pragma once

namespace at {

inline int get_num_threads() { return 4; }
inline bool in_parallel_region() { return false; }

namespace internal {
inline void lazy_init_num_threads() {}
}  // namespace internal

}  // namespace at
