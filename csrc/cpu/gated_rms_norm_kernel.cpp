// The kernels of gated_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows that
// are gated before they are summed, or after they are normalized. With the activated gate a:
//   norm first: y = x * rstd * w * a
//   gate first: h = x * a, which the first pass caches, and y = h * rstd * w
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(ForwardKernel, gated_rms_norm_kernel, kGatedRmsNormKernel)
#else
#include "activation.inl"
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input and output. Each row is prefetched while the activation of the previous row is computed: this
// takes so long that the processor does not read far enough ahead.
template <class T, bool kNormFirst>
struct GatedRmsNorm : RowOp<T> {
  static constexpr auto kTensors = [] {
    if constexpr (kNormFirst)
      return std::array{kInput, kGate};
    else
      return std::array{kInput, kGate, kRowScratch};
  }();
  static constexpr bool kComputeBound = true, kInOutput = std::is_same_v<T, compute_t<T>>;
  static constexpr bool kFetchesOutput = !kNormFirst && !kInOutput;
  static constexpr Ahead kAhead = kNormFirst ? Ahead::when_written : Ahead::when_summed;

  struct Shared {
    explicit Shared(const CpuArgs& args)
        : gate_dtype(args[kGate].dtype),
          activation(args.gating.activation),
          scratch_stride(holds_in_output(args) ? 0 : padded_cols(kDType<T>, args.cols)) {}
    DType gate_dtype;
    Activation activation;
    int64_t scratch_stride;  // between the rows of a tile
  };

  const T* x;
  AnyRow<T, const char> gate;
  Activation activation;
  compute_t<T>* scratch = nullptr;

  template <class Rows>
  NORMOPS_INLINE GatedRmsNorm(const Rows& rows, const Shared& shared, int r)
      : x(rows.template row<kInput, const T>()),
        gate{rows.template row<kGate, const char>(), shared.gate_dtype},
        activation(shared.activation) {
    if constexpr (!kNormFirst) scratch = rows.template row<kRowScratch, compute_t<T>>() + r * shared.scratch_stride;
  }

  template <class Extent>
  NORMOPS_INLINE Block<T> a(int64_t column, Extent extent) const {
    return activated(gate.load(column, extent), activation);
  }

  template <bool kSums, class Extent>
  NORMOPS_INLINE Block<T> h(int64_t column, Extent extent) const {
    if constexpr (kNormFirst) {
      return load<T>(x + column, extent);
    } else if constexpr (!kSums) {
      if constexpr (kInOutput) return load<T>(scratch + column, extent);
      return load_packed<T>(scratch + column);
    } else {
      const Block<T> h = load<T>(x + column, extent) * a(column, extent);
      if constexpr (kInOutput) {
        store(scratch + column, h, extent);
      } else {
        store_packed<T>(scratch + column, h);
      }
      return h;
    }
  }

  template <class Parts, class Extent>
  NORMOPS_INLINE void finish(const Parts&, Block<T> (&y)[1], int64_t column, Extent extent) const
    requires kNormFirst
  {
    y[0] = y[0] * a(column, extent);
  }

  NORMOPS_INLINE void prefetch(int64_t column) const {
    NORMOPS_ISA::prefetch(x + column);
    gate.prefetch(column);
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() {
      args.gating.norm_before_gate ? visit.template operator()<GatedRmsNorm<T, true>>()
                                   : visit.template operator()<GatedRmsNorm<T, false>>();
    });
  }
};

}  // namespace

extern const ForwardKernel kGatedRmsNormKernel;
const ForwardKernel kGatedRmsNormKernel = ForwardKernelsOf<Variants>::rows;

}  // namespace normops::cpu::NORMOPS_ISA
#endif
