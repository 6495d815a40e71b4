// Huge pages for large outputs.
#pragma once
#include <cstdint>

namespace normops::cpu {

// Asks the system for huge pages in new memory of 32 MiB or more, unless NORMOPS_HUGE_PAGES=0: each page of such an
// output is mapped and zeroed at its first touch, which takes several times as long as the operator. From this size on
// glibc's malloc maps memory of its own for every block, and gives it back; the advice ends with that. Where another
// malloc serves, nothing is asked for.
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace normops::cpu
