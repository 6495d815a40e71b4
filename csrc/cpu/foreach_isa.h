// Compiles the kernel source that includes this header, and that NORMOPS_KERNEL_SOURCE names, once per instruction set,
// each time into the namespace normops::cpu::NORMOPS_ISA. Defines NORMOPS_CHOOSE, to be used after it. For x86-64 the
// build compiles each such file twice, with NORMOPS_WITHOUT_AVX512 and with NORMOPS_WITHOUT_AVX2, as half the code
// takes half the memory.
//
// Standard headers come first: their inline functions must not be compiled for a wide instruction set, as the linker
// could keep that copy for all callers.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../dispatch.h"
#include "isa.h"
#include "kernels.h"
#include "row_iterator.h"

// Only inlined functions pass registers that are wider than the architecture's baseline.
#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(NORMOPS_EMULATION)

// For tests: the header names and emulates an instruction set that this machine may not have.
#include NORMOPS_EMULATION
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#define NORMOPS_EACH_ISA(name) {&NORMOPS_ISA::name}
#define NORMOPS_DECLARE_EACH(type, name)

#elif defined(__x86_64__)

// Code between NORMOPS_BEGIN_TARGET(features) and NORMOPS_END_TARGET is compiled for these features, too.
#define NORMOPS_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define NORMOPS_BEGIN_TARGET(features) \
  NORMOPS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NORMOPS_END_TARGET NORMOPS_PRAGMA(clang attribute pop)
#else
#define NORMOPS_BEGIN_TARGET(features) NORMOPS_PRAGMA(GCC push_options) NORMOPS_PRAGMA(GCC target(features))
#define NORMOPS_END_TARGET NORMOPS_PRAGMA(GCC pop_options)
#endif

#define NORMOPS_F16C
#if !defined(NORMOPS_WITHOUT_AVX2)
NORMOPS_BEGIN_TARGET("avx2,fma,f16c")
#define NORMOPS_ISA avx2
#define NORMOPS_VECTOR_BYTES 32
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#undef NORMOPS_ISA
#undef NORMOPS_VECTOR_BYTES
NORMOPS_END_TARGET
#endif

#if !defined(NORMOPS_WITHOUT_AVX512)
// GCC's own AVX-512 headers read undefined registers on purpose and warn about it (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
NORMOPS_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NORMOPS_ISA avx512
#define NORMOPS_VECTOR_BYTES 64
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#undef NORMOPS_ISA
#undef NORMOPS_VECTOR_BYTES
NORMOPS_END_TARGET
#endif
#undef NORMOPS_F16C

#define NORMOPS_EACH_ISA(name) {nullptr, &avx2::name, &avx512::name}
#define NORMOPS_DECLARE_EACH(type, name) \
  namespace avx2 {                       \
  extern const type name;                \
  }                                      \
  namespace avx512 {                     \
  extern const type name;                \
  }

#else

#if defined(__aarch64__)
#define NORMOPS_ISA neon
#else
#define NORMOPS_ISA baseline
#endif
#define NORMOPS_VECTOR_BYTES 16
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#define NORMOPS_EACH_ISA(name) {nullptr, &NORMOPS_ISA::name}
#define NORMOPS_DECLARE_EACH(type, name)

#endif

// Defines function(), which returns the table `name` of type `type` for current_isa(). The kernel source defines one
// table for each instruction set. The variants are in the order of the enumeration Isa.
#if defined(NORMOPS_WITHOUT_AVX2)
#define NORMOPS_CHOOSE(type, function, name)
#else
#define NORMOPS_CHOOSE(type, function, name)                           \
  namespace normops::cpu {                                             \
  NORMOPS_DECLARE_EACH(type, name)                                     \
  const type& function() {                                             \
    static constexpr const type* kVariants[] = NORMOPS_EACH_ISA(name); \
    return *kVariants[static_cast<int>(current_isa())];                \
  }                                                                    \
  }
#endif
