// The kernels of gated_rms_norm_backward, compiled once per instruction set by foreach_isa.h: those of
// rms_norm_backward for a gated grad_output, or a gated input. With the activated gate a and its slope a':
//   norm first: y = x * rstd * w * a
//     dy * a replaces dy, and grad_gate = dy * x * rstd * w * a'
//   gate first: h = x * a, y = h * rstd * w
//     h replaces x, and with the gradient dh of h, grad_input = dh * a and grad_gate = dh * x * a'
#if !defined(NORMOPS_ISA)
#define NORMOPS_KERNEL_SOURCE "gated_rms_norm_backward_kernel.cpp"
#include "foreach_isa.h"
NORMOPS_CHOOSE(BackwardKernel, gated_rms_norm_backward_kernel, kGatedRmsNormBackwardKernel)
#else
#include "activation.inl"
#include "backward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input, grad_output and grad_input.
template <class T, bool kNormFirst>
struct GatedRmsNormBackward : BackwardRowOp<T, T> {
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kGate, kGradInput, kGradGate};
  // A call that requests only grad_weight, which is rare, computes unused results.
  static constexpr bool kComputeBound = true, kFormsGradient = kNormFirst, kSharedTerms = !kNormFirst;
  static constexpr int64_t kRowBytes = 3 * sizeof(T) + sizeof(compute_t<T>), kAllBytes = 5 * sizeof(T);

  struct Shared {
    explicit Shared(const CpuArgs& args)
        : gate_dtype(args[kGate].dtype),
          activation(args.gating.activation),
          rounding(args.rounding),
          scratch(static_cast<compute_t<T>*>(args.row_scratch)),
          scratch_stride(padded_cols(kDType<T>, args.cols)) {}
    DType gate_dtype;
    Activation activation;
    Rounding rounding;
    compute_t<T>* scratch;
    int64_t scratch_stride;
  };

  AnyRow<T, const char> gate;
  AnyRow<T, char> grad_gate;
  Activation activation;
  Rounding rounding;
  compute_t<T>* scratch;  // smaller_part() of the gate

  GatedRmsNormBackward() = default;
  template <class Rows>
  NORMOPS_INLINE GatedRmsNormBackward(const Rows& rows, const Shared& shared, int position)
      : BackwardRowOp<T, T>(rows),
        gate{rows.template row<kGate, const char>(), shared.gate_dtype},
        grad_gate{rows.template row<kGradGate, char>(), shared.gate_dtype},
        activation(shared.activation),
        rounding(shared.rounding),
        scratch(shared.scratch + position * shared.scratch_stride) {}

  struct Outputs {
    Block<T> grad_input, grad_gate;
  };

  struct Terms {
    Block<T> dy, h;  // gradient and input of the norm
    // The activation's value, and its slope times the gated tensor, grad_output or input. With separate slope and
    // factor, GCC 12 would also store them on the stack.
    Block<T> value, slope;
    Rounding rounding;

    NORMOPS_INLINE Outputs outputs(const Block<T>& gradient, const Block<T>& rstd, const Block<T>& w) const {
      if constexpr (kNormFirst) {
        const Block<T> normalized = round_if<GatedRmsNormBackward>(h * rstd, rounding.normalized);
        return {gradient, round_if<GatedRmsNormBackward>(normalized * w, rounding.multiplied) * slope};
      }
      return {gradient * value, gradient * slope};
    }
  };

  template <class Extent>
  NORMOPS_INLINE Block<T> h(int64_t column, Extent extent) const {
    if constexpr (kNormFirst) return load<T>(this->input + column, extent);
    return summed(column, extent).h;
  }
  template <class Extent>
  NORMOPS_INLINE Terms summed(int64_t column, Extent extent) const {
    const Block<T> g = gate.load(column, extent), smaller = smaller_part(g);
    store_packed<T>(scratch + column, smaller);
    return gated(column, extent, activated(g, smaller, activation));
  }
  template <class Extent>
  NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
    return gated(column, extent, activated(gate.load(column, extent), load_packed<T>(scratch + column), activation));
  }
  NORMOPS_INLINE void prefetch_read(int64_t column) const {
    prefetch(this->input + column);
    prefetch(this->grad_output + column);
    gate.prefetch(column);
  }
  NORMOPS_INLINE void prefetch_written(int64_t column) const {
    prefetch(this->grad_input + column);
    grad_gate.prefetch(column);
  }
  template <class Extent, class StorePolicy>
  NORMOPS_INLINE void store(int64_t column, const Outputs& outputs, Extent extent, StorePolicy way) const {
    if (this->grad_input != nullptr) NORMOPS_ISA::store(this->grad_input + column, outputs.grad_input, extent, way);
    if (grad_gate.data != nullptr) grad_gate.store(column, outputs.grad_gate, extent, way);
  }

 private:
  template <class Extent>
  NORMOPS_INLINE Terms gated(int64_t column, Extent extent, const Activated<T>& a) const {
    const Block<T> dy = load<T>(this->grad_output + column, extent), x = load<T>(this->input + column, extent);
    if constexpr (kNormFirst) return {dy * a.value, x, a.value, dy * a.slope, rounding};
    return {dy, x * a.value, a.value, x * a.slope, rounding};
  }
};

struct Variants {
  template <class Visit>
  static void dispatch_row_op(const CpuArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() {
      args.gating.norm_before_gate ? visit.template operator()<GatedRmsNormBackward<T, true>>()
                                   : visit.template operator()<GatedRmsNormBackward<T, false>>();
    });
  }
};

}  // namespace

extern const BackwardKernel kGatedRmsNormBackwardKernel;
const BackwardKernel kGatedRmsNormBackwardKernel = BackwardKernelsOf<Variants>::rows;

}  // namespace normops::cpu::NORMOPS_ISA
#endif
