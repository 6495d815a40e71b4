// The kernels of gated_rms_norm_backward, compiled once per instruction set by foreach_isa.h: those of
// rms_norm_backward for a gated grad_output, or a gated input. With the activated gate a and its slope a',
//   norm first: y = x * rstd * w * a
//     dy * a takes the place of dy, and grad_gate = dy * x * rstd * w * a'
//   gate first: h = x * a, y = h * rstd * w
//     h takes the place of x, and with the gradient dh of h, grad_input = dh * a and grad_gate = dh * x * a'
#include "activation.inl"
#include "backward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input, grad_output and grad_input.
template <class T, bool kNormFirst>
class GatedGradientRows {
 public:
  using Element = T;
  using Gradient = T;
  // If grad_weight alone is wanted, which is rare, the rest is formed in vain.
  static constexpr bool kCostly = true, kGradRows = true, kFormsGradient = kNormFirst, kSharedTerms = !kNormFirst;
  static constexpr int64_t kRowBytes = 3 * sizeof(T) + sizeof(compute_t<T>), kAllBytes = 5 * sizeof(T);

  struct Row {
    const T *grad_output, *input;
    GateRow<T, const char> gate;
    T* grad_input;  // null if not wanted
    GateRow<T, char> grad_gate;
    Activation activation;
    Casting casting;
    compute_t<T>* held;  // the smaller parts of the gate's sigmoid

    struct Outputs {
      Block<T> grad_input, grad_gate;
    };

    struct Terms {
      Block<T> dy, x;  // as the norm sees them
      // The activation's value, and its slope times grad_output or input, whichever is gated. If slope and factor were
      // kept apart, GCC 12 would also store them on the stack.
      Block<T> value, slope;
      Casting casting;

      NORMOPS_INLINE Outputs outputs(const Block<T>& gradient, const Block<T>& rstd, const Block<T>& w) const {
        if constexpr (kNormFirst) {
          const Block<T> normalized = cast<GatedGradientRows>(x * rstd, casting.normalized);
          return {gradient, cast<GatedGradientRows>(normalized * w, casting.multiplied) * slope};
        }
        return {gradient * value, gradient * slope};
      }
    };

    template <class Extent>
    NORMOPS_INLINE Block<T> x(int64_t column, Extent extent) const {
      if constexpr (kNormFirst) return load<T>(input + column, extent);
      return summed(column, extent).x;
    }
    template <class Extent>
    NORMOPS_INLINE Terms summed(int64_t column, Extent extent) const {
      const Block<T> g = gate.load(column, extent), smaller = smaller_part(g);
      store_held<T>(held + column, smaller);
      return gated(column, extent, activated(g, smaller, activation));
    }
    template <class Extent>
    NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
      return gated(column, extent, activated(gate.load(column, extent), load_held<T>(held + column), activation));
    }
    NORMOPS_INLINE void prefetch_read(int64_t column) const {
      prefetch(input + column);
      prefetch(grad_output + column);
      gate.prefetch(column);
    }
    NORMOPS_INLINE void prefetch_written(int64_t column) const {
      prefetch(grad_input + column);
      grad_gate.prefetch(column);
    }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int64_t column, const Outputs& outputs, Extent extent, Way way) const {
      if (grad_input != nullptr) NORMOPS_ISA::store(grad_input + column, outputs.grad_input, extent, way);
      if (grad_gate.data != nullptr) grad_gate.store(column, outputs.grad_gate, extent, way);
    }

   private:
    template <class Extent>
    NORMOPS_INLINE Terms gated(int64_t column, Extent extent, const Activated<T>& a) const {
      const Block<T> dy = load<T>(grad_output + column, extent), x = load<T>(input + column, extent);
      if constexpr (kNormFirst) return {dy * a.value, x, a.value, dy * a.slope, casting};
      return {dy, x * a.value, a.value, x * a.slope, casting};
    }
  };

  GatedGradientRows(const CpuArgs& args, int64_t row)
      : args_(args),
        grad_outputs_(args[kGradOutput], args.weight.groups, row),
        inputs_(args[kInput], args.weight.groups, row),
        gates_(args[kGate], args.weight.groups, row),
        grad_inputs_(args[kGradInput], args.weight.groups, row),
        grad_gates_(args[kGradGate], args.weight.groups, row) {}

  void next_rows(int count, int64_t group) {
    each([&](auto& rows) { rows.next_rows(count, group); });
  }
  void next_group() {
    each([](auto& rows) { rows.next_group(); });
  }
  Row next(int r, int position) {
    Row row;
    row.grad_output = grad_outputs_.next<const T>(r);
    row.input = inputs_.next<const T>(r);
    row.gate = {gates_.next<const char>(r), args_[kGate].dtype};
    row.grad_input = args_.has(kGradInput) ? grad_inputs_.next<T>(r) : nullptr;
    row.grad_gate = {args_.has(kGradGate) ? grad_gates_.next<char>(r) : nullptr, args_[kGate].dtype};
    row.activation = args_.gating.activation;
    row.casting = args_.casting;
    row.held = static_cast<compute_t<T>*>(args_.held) + position * padded_cols(kDType<T>, args_.cols);
    return row;
  }

  static bool begins_with_lines(const CpuArgs& args) {
    return args[kGate].dtype == args.dtype() && NORMOPS_ISA::begins_with_lines(args[kGradInput]) &&
           NORMOPS_ISA::begins_with_lines(args[kGradGate]);
  }

 private:
  // Calls visit(rows) for each tensor that there is.
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_);
    visit(inputs_);
    visit(gates_);
    if (args_.has(kGradInput)) visit(grad_inputs_);
    if (args_.has(kGradGate)) visit(grad_gates_);
  }

  const CpuArgs& args_;
  GroupedRows grad_outputs_, inputs_, gates_, grad_inputs_, grad_gates_;
};

// Calls visit.template operator()<Source>() with the source that the arguments ask for.
template <class Visit>
void dispatch_gated(const CpuArgs& args, Visit visit) {
  dispatch(args.dtype(), [&]<class T>() {
    args.gating.norm_before_gate ? visit.template operator()<GatedGradientRows<T, true>>()
                                 : visit.template operator()<GatedGradientRows<T, false>>();
  });
}

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class Source>() { backward_parts<Source>(args, begin, end); });
}

void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
  dispatch_gated(args, [&]<class Source>() { backward_sums<Source>(args, row, begin, end, squares, dots); });
}

void columns(const CpuArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class Source>() { backward_columns<Source>(args, row, square_sum, dot, begin, end); });
}

}  // namespace

extern const BackwardKernels kGatedRmsNormBackwardKernels;
const BackwardKernels kGatedRmsNormBackwardKernels = {rows, sums, columns};

}  // namespace normops::cpu::NORMOPS_ISA
