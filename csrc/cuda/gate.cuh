// The gate of gated_rms_norm: the activation, its slope, and the storage of a row of gates.
#pragma once
#include <cmath>

#include "../kernel_args.h"
#include "operator_kernels.cuh"

namespace normops::cuda {

template <class Compute>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr int kFractionBits = 23, kBias = 127;
  static constexpr int kDegree = 7;         // of the series: its remainder is less than 2^-27
  static constexpr float kLowest = -104;    // below it, the result is 0
  static constexpr float kShift = 0x3p22f;  // added to a number, it leaves the nearest integer in the lowest bits
  static constexpr float kLog2E = 0x1.715476p+0f, kLn2 = 0x1.62e430p-1f, kRestOfLn2 = -0x1.05c610p-29f;
  static constexpr int kLift = 64;
  static constexpr float kLower = 0x1p-64f;
};

template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr int kFractionBits = 52, kBias = 1023;
  static constexpr int kDegree = 13;
  static constexpr double kLowest = -746;
  static constexpr double kShift = 0x3p51;
  static constexpr double kLog2E = 0x1.71547652b82fep+0, kLn2 = 0x1.62e42fefa39efp-1,
                          kRestOfLn2 = 0x1.abc9e3b39803fp-56;
  static constexpr int kLift = 512;
  static constexpr double kLower = 0x1p-512;
};

constexpr double factorial(int n) { return n <= 1 ? 1 : n * factorial(n - 1); }

// 1 / k! + r / (k + 1)! + ...
template <int k, class Compute>
__device__ Compute exp_series(Compute r) {
  constexpr Compute kTerm = static_cast<Compute>(1 / factorial(k));
  if constexpr (k == ExpConstants<Compute>::kDegree) {
    return kTerm;
  } else {
    return fma_rn(exp_series<k + 1>(r), r, kTerm);
  }
}

// Returns exp(x) for x <= 0 or NaN, computed as 2^n * exp(r) with |r| <= ln(2) / 2. The error of the device's fast exp
// grows with x.
template <class Compute>
__device__ Compute exp_of_negative(Compute x) {
  using C = ExpConstants<Compute>;
  if (x < C::kLowest) x = C::kLowest;
  const Compute shifted = fma_rn(x, C::kLog2E, C::kShift), n = shifted - C::kShift;
  const Compute r = fma_rn(n, -C::kRestOfLn2, fma_rn(n, -C::kLn2, x));
  // Multiplies by 2^n in two steps, so that a subnormal result is rounded once.
  typename C::Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + (C::kBias + C::kLift)) << C::kFractionBits;
  Compute lifted;
  std::memcpy(&lifted, &bits, sizeof lifted);
  return exp_series<0>(r) * lifted * C::kLower;
}

template <class T>
struct Activated {
  Numbers<T> value, slope;
};

template <class T>
__device__ Activated<T> activate(const Numbers<T>& gate, Activation activation) {
  using Compute = compute_t<T>;
  const bool is_silu = activation == Activation::silu;
  Activated<T> a;
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) {
    const Compute g = gate.element[i];
    const Compute e = exp_of_negative(-std::fabs(g));
    const Compute larger = reciprocal(1 + e), smaller = e * larger;
    const Compute sigmoid = g < 0 ? smaller : larger, rest = g < 0 ? larger : smaller;  // their sum is 1
    a.value.element[i] = (is_silu ? g : 1) * sigmoid;
    a.slope.element[i] = fma_rn(a.value.element[i], rest, is_silu ? sigmoid : 0);
  }
  return a;
}

// numbers *= factors
template <class T>
__device__ void multiply(Numbers<T>& numbers, const Numbers<T>& factors) {
#pragma unroll
  for (int i = 0; i < kPack<T>; i++) numbers.element[i] *= factors.element[i];
}

// A thread's packs of a row of gates, which stay in registers once loaded.
template <class T, int kPacks, class Access>
struct HeldGate {
  using Rows = PlainRows<const T>;
  Pack<T> packs[kPacks];

  __device__ void load(const Rows& rows, const T* row, bool is_row, const Columns<T, int>& columns) {
    load_packs<T>(packs, rows, row, is_row, columns);
  }
  __device__ void keep() { keep_packed(packs); }
  __device__ Numbers<T> numbers(const Rows&, const Columns<T, int>&, int p) const { return to_compute<T>(packs[p]); }
};

// Packs of a row of gates of any dtype, which are loaded at each use.
template <class T, int kPacks>
struct HeldGate<T, kPacks, General> {
  using Rows = AnyRowsOf<const T>;
  const char* row;  // null: zeros

  __device__ void load(const Rows&, const char* row_of_gate, bool is_row, const Columns<T, int>&) {
    row = is_row ? row_of_gate : nullptr;
  }
  __device__ void keep() {}
  __device__ Numbers<T> numbers(const Rows& rows, const Columns<T, int>& columns, int p) const {
    return load_numbers(rows, row, columns.column(p), row != nullptr ? columns.count(p) : 0);
  }
};

struct GatedKernels : OperatorKernels {
  template <class R>
  static RowConfig config(const KernelArgs& args, const Device& device) {
    return gated_config(packs_of<R>(args.cols), device);
  }
  static constexpr bool holds(int packs) { return packs <= kMostGatedPacks; }
};

}  // namespace normops::cuda
