// The kernels of add_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows h that
// are computed while they are summed.
//   h = residual_out = alpha * x + residual
//   y = h * rstd * w, rstd = 1 / sqrt(mean(h^2) + eps)
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "add_rms_norm_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(ForwardKernel, add_rms_norm_kernel, kAddRmsNormKernel)
#else
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// h = x + residual, or if kScaled, alpha * x + residual, rounded to residual's type R: the rounded values are summed
// and normalized. If alpha is 1, a multiply-add has the bits of an addition.
template <class T, class R, bool kScaled>
struct AddRmsNorm : RowOp<T, R> {
  static constexpr TensorIndex kTensors[] = {kInput, kResidual, kResidualOut};
  static constexpr bool kComputeBound = kScaled, kFetchesOutput = true;

  struct Shared {
    explicit Shared(const CpuArgs& args) : alpha(canonical_number<R>(args.alpha)), casts(args.rounding.multiplied) {}
    compute_t<R> alpha;
    bool casts;
  };

  const T* x;
  const R* residual;
  R* sum;
  Shared shared;

  template <class Rows>
  NORMOPS_INLINE AddRmsNorm(const Rows& rows, const Shared& shared, int)
      : x(rows.template row<kInput, const T>()),
        residual(rows.template row<kResidual, const R>()),
        sum(rows.template row<kResidualOut, R>()),
        shared(shared) {}

  template <bool kSums, class Extent>
  NORMOPS_INLINE Block<R> h(int64_t column, Extent extent) const {
    if constexpr (kSums) {
      const Block<R> branch = load<R>(x + column, extent), other = load<R>(residual + column, extent);
      const Block<R> alpha = broadcast<R>(shared.alpha);
      const Block<R> total = !kScaled       ? branch + other
                             : shared.casts ? rounded<T>(alpha * branch) + other
                                            : fma(alpha, branch, other);
      store(sum + column, total, extent);
    }
    return load<R>(sum + column, extent);
  }

  NORMOPS_INLINE void prefetch(int64_t column) const {
    NORMOPS_ISA::prefetch(x + column);
    NORMOPS_ISA::prefetch(residual + column);
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch_pair(args[kInput].dtype, args.dtype(), [&]<class T, class R>() {
      if constexpr (kHasFastPath<T> && kHasFastPath<R>) {
        // If scaled, narrow rows take up to 1.15 of the time on AVX-512.
        if (args.alpha == 1) return visit.template operator()<AddRmsNorm<T, R, false>>();
      }
      visit.template operator()<AddRmsNorm<T, R, true>>();
    });
  }
};

}  // namespace

extern const ForwardKernel kAddRmsNormKernel;
const ForwardKernel kAddRmsNormKernel = ForwardKernelsOf<Variants>::rows;

}  // namespace normops::cpu::NORMOPS_ISA
#endif
