// The kernels of rms_norm, compiled once per instruction set by foreach_isa.h:
//   y = x * rstd * (weight + weight_offset) + bias, rstd = 1 / sqrt(mean(x^2) + eps)
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "rms_norm_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(RmsNormKernels, rms_norm_kernels, kRmsNormKernels)
#else
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class T, class W>
void scale_columns(const W* weight, double weight_offset, compute_t<T>* scale, int64_t count) {
  const Block<T> offset = broadcast<T>(canonical_number<T>(weight_offset));
  for_each_block<T>(0, count, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    store_packed<T>(scale + column, load<T>(weight + column, extent) + offset);
  });
}

void scale(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t count) {
  dispatch(dtype, [&]<class T>() {
    dispatch(weight_dtype, [&]<class W>() {
      scale_columns<T>(static_cast<const W*>(weight), weight_offset, static_cast<compute_t<T>*>(scale), count);
    });
  });
}

// kWithSums: whether the sums of squares are inputs or outputs.
template <class T, bool kWithSums>
struct RmsNorm : InputRow<T> {
  static constexpr auto kTensors = [] {
    if constexpr (kWithSums) {
      return std::array{kInput, kSquareSum};
    } else {
      return std::array{kInput};
    }
  }();

  template <class Rows, class Shared>
  NORMOPS_INLINE RmsNorm(const Rows& rows, const Shared&, int) : InputRow<T>(rows) {}
};

// A row with a full-size weight, passed as kGate, or a bias, or both.
template <class T>
struct ModulatedRmsNorm : InputRow<T> {
  static constexpr TensorIndex kTensors[] = {kInput, kGate, kBias};
  static constexpr bool kComputeBound = true, kOneLoop = true;

  struct Shared {
    explicit Shared(const CpuArgs& args)
        : weight_dtype(args[kGate].dtype),
          bias_dtype(args[kBias].dtype),
          weight_offset(canonical_number<T>(args.weight.offset)),
          rounds(sizeof(T) == 2 && args.rounding.multiplied) {}
    DType weight_dtype, bias_dtype;
    compute_t<T> weight_offset;
    bool rounds;
  };

  AnyRow<T, const char> weight, bias;
  compute_t<T> weight_offset;
  bool rounds;

  template <class Rows>
  NORMOPS_INLINE ModulatedRmsNorm(const Rows& rows, const Shared& shared, int)
      : InputRow<T>(rows),
        weight{rows.template row<kGate, const char>(), shared.weight_dtype},
        bias{rows.template row<kBias, const char>(), shared.bias_dtype},
        weight_offset(shared.weight_offset),
        rounds(shared.rounds) {}

  template <class Parts, class Extent>
  NORMOPS_INLINE void finish(const Parts&, Block<T> (&y)[1], int64_t column, Extent extent) const {
    if (weight.data != nullptr) y[0] = y[0] * (weight.load(column, extent) + broadcast<T>(weight_offset));
    if (bias.data == nullptr) return;
    if (rounds) y[0] = rounded<T>(y[0]);
    y[0] = y[0] + bias.load(column, extent);
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() {
      if (args.sums != Sums::compute) return visit.template operator()<RmsNorm<T, true>>();
      args.has(kBias) || args.has(kGate) ? visit.template operator()<ModulatedRmsNorm<T>>()
                                         : visit.template operator()<RmsNorm<T, false>>();
    });
  }
};

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale, ForwardKernelsOf<Variants>::rows};

}  // namespace normops::cpu::NORMOPS_ISA
#endif
