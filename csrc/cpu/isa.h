// Which CPU instruction set the kernels use. Every kernel source is compiled once per instruction set (foreach_isa.h).
#pragma once
#include <string>
#include <vector>

namespace normops::cpu {

// In rising order of preference. `composite` is no kernels at all: operators are their definition in ATen operators, as
// they are on an x86-64 without AVX2, FMA or F16C. `baseline` is what every CPU of another architecture has.
#if defined(__x86_64__)
enum class Isa { composite, avx2, avx512 };
#elif defined(__aarch64__)
enum class Isa { composite, neon };
#else
enum class Isa { composite, baseline };
#endif

[[gnu::visibility("default")]] const char* isa_name(Isa isa);

// What this build holds, in rising order of preference.
[[gnu::visibility("default")]] std::vector<std::string> compiled_isas();

// The best one that this machine runs, or the one that the environment variable NORMOPS_CPU_ISA names; fixed at the
// first call. Throws std::runtime_error when that name is unknown or the machine lacks a feature it needs.
[[gnu::visibility("default")]] Isa current_isa();

// Whether that has kernels, for those who cannot let an exception through.
[[gnu::visibility("default")]] bool has_kernels() noexcept;

}  // namespace normops::cpu
