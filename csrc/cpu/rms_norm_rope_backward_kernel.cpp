// The kernels of rms_norm_rope_backward, compiled once per instruction set by foreach_isa.h: those of
// rms_norm_backward, for a grad_output that is rotated back. For a pair of columns i, j of grad_output g:
//   dy[i] = g[i] * cos[i] + g[j] * sin[j]
//   dy[j] = g[j] * cos[j] - g[i] * sin[i]
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_backward_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(BackwardKernel, rms_norm_rope_backward_kernel, kRmsNormRopeBackwardKernel)
#else
#include "backward_rows.inl"
#include "rotation.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input, grad_output and grad_input, W that of cos and sin.
template <class T, class W, Pairing pairing>
struct RmsNormRopeBackward : BackwardRowOp<T, T> {
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kCos, kGradInput};
  static constexpr Pairing kPairing = pairing;
  // A call that requests only grad_weight, which is rare, computes unused results.
  static constexpr bool kFormsGradient = true;

  using Shared = SharedRotation;
  template <int kCount>
  struct PairedTerms {
    typename BackwardRowOp<T, T>::Terms part[kCount];
  };

  Angles<T, W> angles;

  RmsNormRopeBackward() = default;
  template <class Rows>
  NORMOPS_INLINE RmsNormRopeBackward(const Rows& rows, const Shared& rotation, int)
      : BackwardRowOp<T, T>(rows), angles(rotation.template angles<T>(rows.template row<kCos, const W>())) {}

  template <class Parts, class Extent>
  NORMOPS_INLINE auto paired_terms(const Parts& parts, int64_t column, Extent extent) const {
    Block<T> dy[Parts::kCount];
    for (int p = 0; p < Parts::kCount; p++) dy[p] = load<T>(this->grad_output + parts.column(column, p), extent);
    angles.template turn<true>(parts, dy, column, extent);
    PairedTerms<Parts::kCount> terms;
    for (int p = 0; p < Parts::kCount; p++) terms.part[p] = {dy[p], this->h(parts.column(column, p), extent)};
    return terms;
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch_pair(args.dtype(), args[kCos].dtype, [&]<class T, class W>() {
      args.rotation.interleaved ? visit.template operator()<RmsNormRopeBackward<T, W, Pairing::interleaved>>()
                                : visit.template operator()<RmsNormRopeBackward<T, W, Pairing::rotate_half>>();
    });
  }
};

}  // namespace

extern const BackwardKernel kRmsNormRopeBackwardKernel;
const BackwardKernel kRmsNormRopeBackwardKernel = BackwardKernelsOf<Variants>::rows;

}  // namespace normops::cpu::NORMOPS_ISA
#endif
