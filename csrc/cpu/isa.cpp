#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <stdexcept>

namespace normops::cpu {
namespace {

#if defined(__x86_64__)
constexpr Isa kCompiled[] = {Isa::composite, Isa::avx2, Isa::avx512};
#elif defined(__aarch64__)
constexpr Isa kCompiled[] = {Isa::composite, Isa::neon};
#else
constexpr Isa kCompiled[] = {Isa::composite, Isa::baseline};
#endif

#if defined(__x86_64__)
// Replaces __builtin_cpu_supports, which does not know this feature in clang 17.
bool cpu_supports_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// Probes every feature that foreach_isa.h enables for the variant, and whether the operating system saves the wide
// registers.
bool machine_runs(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_supports_f16c();
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return true;
}

Isa choose_isa() {
  const char* forced = std::getenv("NORMOPS_CPU_ISA");
  const bool is_forced = forced != nullptr && *forced != '\0';
  Isa best = kCompiled[0];
  std::string usable;
  for (Isa isa : kCompiled) {
    if (!machine_runs(isa)) continue;
    if (is_forced && isa_name(isa) == std::string(forced)) return isa;
    usable += (usable.empty() ? "" : ", ") + std::string(isa_name(isa));
    best = isa;
  }
  if (is_forced) {
    throw std::runtime_error("expected NORMOPS_CPU_ISA to be an instruction set that this machine runs (" + usable +
                             "), but got " + forced);
  }
  return best;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::composite:
      return "composite";
#if defined(__x86_64__)
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
#elif defined(__aarch64__)
    case Isa::neon:
      return "neon";
#else
    case Isa::baseline:
      return "baseline";
#endif
  }
  return "unknown";
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (Isa isa : kCompiled) names.emplace_back(isa_name(isa));
  return names;
}

Isa current_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

bool has_kernels() noexcept {
  try {
    return current_isa() != Isa::composite;
  } catch (const std::runtime_error&) {
    return true;  // current_isa() reports the error
  }
}

}  // namespace normops::cpu
