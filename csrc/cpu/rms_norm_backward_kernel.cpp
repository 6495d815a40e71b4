// The kernels of rms_norm_backward, compiled once per instruction set by foreach_isa.h:
//   grad_input = dy * w * rstd - x * rstd^3 * mean(dy * w * x) + grad_residual
//   grad_weight = the sum over rows of dy * x * rstd
//   grad_bias = the sum over rows of dy
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "rms_norm_backward_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(RmsNormBackwardKernels, rms_norm_backward_kernels, kRmsNormBackwardKernels)
#else
#include "backward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// kWritten: whether rows are written.
template <class T, class R, bool kWritten>
struct RmsNormBackward : BackwardRowOp<R, T> {
  static constexpr auto kTensors = [] {
    if constexpr (kWritten) {
      return std::array{kGradOutput, kInput, kGradResidual, kGradInput};
    } else {
      return std::array{kGradOutput, kInput};
    }
  }();
  static constexpr bool kGradRows = kWritten, kTakesResidualAndSums = true;

  const R* residual;

  RmsNormBackward() = default;
  template <class Rows, class Shared>
  NORMOPS_INLINE RmsNormBackward(const Rows& rows, const Shared&, int)
      : BackwardRowOp<R, T>(rows), residual(rows.template row<kGradResidual, const R>()) {}

  template <class Extent, class StorePolicy>
  NORMOPS_INLINE void store(int64_t column, const Block<R>& gradient, Extent extent, StorePolicy way) const {
    if constexpr (kWritten) NORMOPS_ISA::store(this->grad_input + column, gradient, extent, way);
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    const bool sums_both = args.has(kGradInput) || args.sums == Sums::output;
    if (!sums_both && args.grad_weight_sums == nullptr && args.grad_bias_sums == nullptr) return;
    dispatch_pair(args[kGradOutput].dtype, args.dtype(), [&]<class T, class R>() {
      sums_both ? visit.template operator()<RmsNormBackward<T, R, true>>()
                : visit.template operator()<RmsNormBackward<T, R, false>>();
    });
  }
};

template <class T, class W>
void grad_weight_columns(const ParameterSum* sums, int64_t count, int64_t first, W* grad_weight, int64_t columns) {
  for_each_block<T>(0, columns, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    Block<T> left[64];
    int last = -1;
    for (int64_t i = 0; i < count; i++) {
      Block<T> sum = load_packed<T>(static_cast<const compute_t<T>*>(sums[i].numbers) + first + column);
      for (int added = 0; added < sums[i].merges; added++) sum = left[last--] + sum;
      left[++last] = sum;
    }
    store(grad_weight + column, left[0], extent);
  });
}

void grad_weight(DType dtype, DType weight_dtype, const ParameterSum* sums, int64_t count, int64_t first,
                 void* grad_weight, int64_t columns) {
  dispatch(dtype, [&]<class T>() {
    dispatch(weight_dtype,
             [&]<class W>() { grad_weight_columns<T>(sums, count, first, static_cast<W*>(grad_weight), columns); });
  });
}

}  // namespace

extern const RmsNormBackwardKernels kRmsNormBackwardKernels;
const RmsNormBackwardKernels kRmsNormBackwardKernels = {BackwardKernelsOf<Variants>::rows, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
#endif
