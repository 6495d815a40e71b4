#include "huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string_view>

namespace normops::cpu {
namespace {

bool is_wanted() {
  const char* setting = std::getenv("NORMOPS_HUGE_PAGES");
  return setting == nullptr || std::string_view(setting) != "0";
}

}  // namespace

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t kMappedBytes = int64_t{32} << 20;
  if (bytes < kMappedBytes) return;
  static const bool wanted = is_wanted();
  if (!wanted) return;
  // Whole pages of this memory alone: its neighbours keep their own.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  // Whether the system follows makes no difference but in time.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace normops::cpu
