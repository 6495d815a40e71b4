// Huge pages for large outputs.
#pragma once
#include <cstdint>

namespace normops::cpu {

// Requests huge pages for new memory of 32 MiB or more, unless NORMOPS_HUGE_PAGES=0. Each page of such an output is
// mapped and zeroed at its first touch, which takes several times as long as the operator. From this size on, glibc's
// malloc maps each block separately and unmaps it when it is freed, which ends the advice. With another malloc, this
// function does nothing.
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace normops::cpu
