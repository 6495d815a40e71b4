// The CPU instruction set of the kernels. Every kernel source is compiled once per instruction set (foreach_isa.h).
#pragma once
#include <string>
#include <vector>

namespace normops::cpu {

// In rising order of preference. `composite` has no kernels: operators run as compositions of ATen operators, as on an
// x86-64 without AVX2, FMA or F16C. `baseline` is the instruction set that every CPU of another architecture has.
#if defined(__x86_64__)
enum class Isa { composite, avx2, avx512 };
#elif defined(__aarch64__)
enum class Isa { composite, neon };
#else
enum class Isa { composite, baseline };
#endif

[[gnu::visibility("default")]] const char* isa_name(Isa isa);

// Returns the names of the instruction sets in this build, in rising order of preference.
[[gnu::visibility("default")]] std::vector<std::string> compiled_isas();

// Returns the best one that this machine runs, or the one that the environment variable NORMOPS_CPU_ISA names; fixed at
// the first call. Throws std::runtime_error if that name is unknown or the machine lacks a required feature.
[[gnu::visibility("default")]] Isa current_isa();

// Returns whether current_isa() has kernels; true if it throws.
[[gnu::visibility("default")]] bool has_kernels() noexcept;

}  // namespace normops::cpu
