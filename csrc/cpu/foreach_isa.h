// Compiles the kernel source named by NORMOPS_KERNEL_SOURCE once per instruction set, each time into a namespace of its
// own, normops::cpu::NORMOPS_ISA. Standard headers come first: an inline function of theirs that was compiled for a
// wide instruction set could be the copy that the linker keeps for everybody.
#include <cmath>
#include <cstdint>
#include <cstring>
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
#include "row_iterator.h"

// Registers wider than those that every CPU of the architecture has are only passed between functions that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(NORMOPS_EMULATION)

// For tests: an instruction set that this machine may not have, which the header names and emulates.
#include NORMOPS_EMULATION
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#define NORMOPS_EACH_ISA(name) {&NORMOPS_ISA::name}

#elif defined(__x86_64__)

// What stands between NORMOPS_BEGIN_TARGET(features) and NORMOPS_END_TARGET is compiled for these features, too.
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
NORMOPS_BEGIN_TARGET("avx2,fma,f16c")
#define NORMOPS_ISA avx2
#define NORMOPS_VECTOR_BYTES 32
#include "block.h"
#include NORMOPS_KERNEL_SOURCE
#undef NORMOPS_ISA
#undef NORMOPS_VECTOR_BYTES
NORMOPS_END_TARGET

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
#undef NORMOPS_F16C

// The table `name`, which the kernel source defines, in all its variants, in the order of the enumeration Isa.
#define NORMOPS_EACH_ISA(name) {nullptr, &avx2::name, &avx512::name}

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

#endif
