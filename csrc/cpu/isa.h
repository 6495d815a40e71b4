// Which CPU instruction set the kernels use. Every kernel source is compiled once per instruction set (foreach_isa.h).
#pragma once
#include <string>
#include <vector>

namespace normops::cpu {

// In rising order of preference. `baseline` is what every CPU of the architecture has.
#if defined(__x86_64__)
enum class Isa { baseline, avx2, avx512 };
#elif defined(__aarch64__)
enum class Isa { neon };
#else
enum class Isa { baseline };
#endif

[[gnu::visibility("default")]] const char* isa_name(Isa isa);

// What this build holds, in rising order of preference.
[[gnu::visibility("default")]] std::vector<std::string> compiled_isas();

// The best one that this machine runs, or the one that the environment variable NORMOPS_CPU_ISA names; fixed at the
// first call. Throws std::runtime_error when that name is unknown or the machine lacks a feature it needs.
[[gnu::visibility("default")]] Isa current_isa();

}  // namespace normops::cpu
