// The kernels of rms_norm_rope, compiled once per instruction set by foreach_isa.h: those of rms_norm, whose rows are
// rotated before they are written. For a pair of columns i, j with z = x * rstd * w:
//   y[i] = z[i] * cos[i] - z[j] * sin[i]
//   y[j] = z[j] * cos[j] + z[i] * sin[j]
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "rms_norm_rope_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(ForwardKernel, rms_norm_rope_kernel, kRmsNormRopeKernel)
#else
#include "forward_rows.inl"
#include "rotation.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input and output, W that of cos and sin.
template <class T, class W, Pairing pairing>
struct RmsNormRope : InputRow<T> {
  static constexpr TensorIndex kTensors[] = {kInput, kCos};
  static constexpr Pairing kPairing = pairing;

  using Shared = SharedRotation;

  Angles<T, W> angles;

  template <class Rows>
  NORMOPS_INLINE RmsNormRope(const Rows& rows, const Shared& rotation, int)
      : InputRow<T>(rows), angles(rotation.template angles<T>(rows.template row<kCos, const W>())) {}

  NORMOPS_INLINE RotaryColumns paired() const { return {angles.offset, angles.pairs}; }

  template <class Parts, class Extent>
  NORMOPS_INLINE void finish(const Parts& parts, Block<T> (&y)[Parts::kCount], int64_t column, Extent extent) const {
    if constexpr (!std::is_same_v<Parts, SingleBlock>) angles.template turn<false>(parts, y, column, extent);
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch_pair(args.dtype(), args[kCos].dtype, [&]<class T, class W>() {
      args.rotation.interleaved ? visit.template operator()<RmsNormRope<T, W, Pairing::interleaved>>()
                                : visit.template operator()<RmsNormRope<T, W, Pairing::rotate_half>>();
    });
  }
};

}  // namespace

extern const ForwardKernel kRmsNormRopeKernel;
const ForwardKernel kRmsNormRopeKernel = ForwardKernelsOf<Variants>::rows;

}  // namespace normops::cpu::NORMOPS_ISA
#endif
