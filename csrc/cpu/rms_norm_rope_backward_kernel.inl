// The kernels of rms_norm_rope_backward, compiled once per instruction set by foreach_isa.h: those of
// rms_norm_backward, for a grad_output that is rotated back.
#include "backward_rows.inl"
#include "rotation.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input, grad_output and grad_input, W that of cos and sin.
template <class T, class W, Pairing pairing>
class RotatedGradientRows {
 public:
  using Element = T;
  using Gradient = T;
  static constexpr Pairing kPairing = pairing;
  // If grad_weight alone is wanted, which is rare, the rest is formed in vain.
  static constexpr bool kCostly = false, kGradRows = true, kFormsGradient = true, kSharedTerms = false;
  static constexpr int64_t kRowBytes = 2 * sizeof(T), kAllBytes = 3 * sizeof(T);

  struct Row {
    const T *grad_output, *input;
    T* grad_input;  // null if not wanted
    Angles<T, W> angles;

    using Outputs = Block<T>;
    struct Terms {
      Block<T> dy, x;

      NORMOPS_INLINE Outputs outputs(const Block<T>& gradient, const Block<T>&, const Block<T>&) const {
        return gradient;
      }
    };
    template <int kCount>
    struct PairedTerms {
      Terms part[kCount];
    };

    template <class Extent>
    NORMOPS_INLINE Block<T> x(int64_t column, Extent extent) const {
      return load<T>(input + column, extent);
    }
    template <class Extent>
    NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
      return {load<T>(grad_output + column, extent), x(column, extent)};
    }
    template <class Parts, class Extent>
    NORMOPS_INLINE auto paired_terms(const Parts& parts, int64_t column, Extent extent) const {
      Block<T> dy[Parts::kCount];
      for (int p = 0; p < Parts::kCount; p++) dy[p] = load<T>(grad_output + parts.column(column, p), extent);
      angles.template turn<true>(parts, dy, column, extent);
      PairedTerms<Parts::kCount> terms;
      for (int p = 0; p < Parts::kCount; p++) terms.part[p] = {dy[p], x(parts.column(column, p), extent)};
      return terms;
    }
    NORMOPS_INLINE void prefetch_read(int64_t column) const {
      prefetch(input + column);
      prefetch(grad_output + column);
    }
    NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(grad_input + column); }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, Way way) const {
      if (grad_input != nullptr) NORMOPS_ISA::store(grad_input + column, gradient, extent, way);
    }
  };

  RotatedGradientRows(const CpuArgs& args, int64_t row)
      : args_(args),
        grad_outputs_(args[kGradOutput], args.weight.groups, row),
        inputs_(args[kInput], args.weight.groups, row),
        cos_(args[kCos], args.weight.groups, row),
        sin_(args[kSin], args.weight.groups, row),
        grad_inputs_(args[kGradInput], args.weight.groups, row) {}

  void next_rows(int count, int64_t group) {
    each([&](auto& rows) { rows.next_rows(count, group); });
  }
  void next_group() {
    each([](auto& rows) { rows.next_group(); });
  }
  Row next(int r, int) {
    Row row;
    row.grad_output = grad_outputs_.next<const T>(r);
    row.input = inputs_.next<const T>(r);
    row.grad_input = args_.has(kGradInput) ? grad_inputs_.next<T>(r) : nullptr;
    row.angles = angles_of<T>(args_.rotation, cos_.next<const W>(r), sin_.next<const W>(r));
    return row;
  }

  static bool begins_with_lines(const CpuArgs& args) { return NORMOPS_ISA::begins_with_lines(args[kGradInput]); }

 private:
  // Calls visit(rows) for each tensor that there is.
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_);
    visit(inputs_);
    visit(cos_);
    visit(sin_);
    if (args_.has(kGradInput)) visit(grad_inputs_);
  }

  const CpuArgs& args_;
  GroupedRows grad_outputs_, inputs_, cos_, sin_, grad_inputs_;
};

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_pair(args.dtype(), args[kCos].dtype, [&]<class T, class W>() {
    args.rotation.interleaved ? backward_parts<RotatedGradientRows<T, W, Pairing::neighbours>>(args, begin, end)
                              : backward_parts<RotatedGradientRows<T, W, Pairing::halves>>(args, begin, end);
  });
}

}  // namespace

extern const BackwardKernels kRmsNormRopeBackwardKernels;
const BackwardKernels kRmsNormRopeBackwardKernels = {rows, nullptr, nullptr};

}  // namespace normops::cpu::NORMOPS_ISA
