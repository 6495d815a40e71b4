#include "huge_pages.h"

#include <cstdlib>
#include <string_view>

#if defined(__linux__) && defined(__GLIBC__)
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace normops::cpu {
namespace {

#if defined(__linux__) && defined(__GLIBC__)

bool is_wanted() {
  const char* setting = std::getenv("NORMOPS_HUGE_PAGES");
  return setting == nullptr || std::string_view(setting) != "0";
}

// Returns whether malloc is glibc's, not one that is loaded before it. Other allocators keep the memory of freed
// blocks, and with it the advice, for blocks of any size. So does glibc's with glibc.malloc.mmap_max=0.
bool is_glibc() {
  Dl_info allocator, libc;
  return dladdr(reinterpret_cast<void*>(&posix_memalign), &allocator) != 0 &&
         dladdr(reinterpret_cast<void*>(&gnu_get_libc_version), &libc) != 0 && allocator.dli_fbase == libc.dli_fbase;
}

// Read when the library is loaded: a static variable of the function would lock a child that another thread forks
// meanwhile.
const bool kIsAdvised = is_wanted() && is_glibc();

#endif

}  // namespace

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(__GLIBC__)
  constexpr int64_t kMappedBytes = int64_t{32} << 20;
  if (bytes < kMappedBytes) return;
  if (!kIsAdvised) return;
  // Advises whole pages within this memory only; adjacent memory is unaffected.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  // Ignores errors: the advice changes only the time.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace normops::cpu
