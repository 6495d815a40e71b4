// The backward kernel of toys.h, compiled once per instruction set by foreach_isa.h.
#include "backward_rows.inl"
#include "turn.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class T>
class RotatedGradientRows {
 public:
  using Element = T;
  using Args = CpuArgs<RotatedBackwardArgs>;
  static constexpr bool kCostly = false, kGradRows = true, kSharedTerms = false;
  static constexpr int64_t kRowBytes = 2 * sizeof(T), kAllBytes = 3 * sizeof(T);

  struct Row {
    const T *grad_output, *input, *cos, *sin;
    T* grad_input;
    int64_t pairs;

    using Outputs = Block<T>;
    struct Terms {
      Block<T> dy, x;

      NORMOPS_INLINE Block<T> rest(const Block<T>& minus_c) const { return minus_c * x; }
      NORMOPS_INLINE Outputs outputs(const Block<T>& gradient, const Block<T>&, const Block<T>&) const {
        return gradient;
      }
    };
    struct PairedTerms {
      Terms part[2];
    };

    template <class Extent>
    NORMOPS_INLINE Block<T> x(int64_t column, Extent extent) const {
      return load<T>(input + column, extent);
    }
    template <class Extent>
    NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
      return {load<T>(grad_output + column, extent), x(column, extent)};
    }
    template <class Extent>
    NORMOPS_INLINE PairedTerms paired_terms(int64_t column, Extent extent) const {
      PairedTerms terms = {{this->terms(column, extent), this->terms(column + pairs, extent)}};
      turn<true>(terms.part[0].dy, terms.part[1].dy, load<T>(cos + column, extent), load<T>(sin + column, extent));
      return terms;
    }
    NORMOPS_INLINE void prefetch_read(int64_t column) const {
      prefetch(input + column);
      prefetch(grad_output + column);
    }
    NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(grad_input + column); }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, Way way) const {
      NORMOPS_ISA::store(grad_input + column, gradient, extent, way);
    }
  };

  RotatedGradientRows(const Args& args, int64_t row)
      : grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, args.weight.groups, row),
        inputs_(static_cast<const T*>(args.input), args.input_rows, args.weight.groups, row),
        cos_(static_cast<const T*>(args.cos), args.angle_rows, args.weight.groups, row),
        sin_(static_cast<const T*>(args.sin), args.angle_rows, args.weight.groups, row),
        grad_inputs_(static_cast<T*>(args.grad_input), args.grad_input_rows, args.weight.groups, row),
        pairs_(args.pairs) {}

  static int64_t pairs(const Args& args) { return args.pairs; }

  void next_rows(int count, int64_t group) {
    each([&](auto& rows) { rows.next_rows(count, group); });
  }
  void next_group() {
    each([](auto& rows) { rows.next_group(); });
  }
  Row next(int r, int) {
    return {grad_outputs_.next(r), inputs_.next(r), cos_.next(r), sin_.next(r), grad_inputs_.next(r), pairs_};
  }

  static bool begins_with_lines(const Args& args) {
    return NORMOPS_ISA::begins_with_lines(static_cast<const T*>(args.grad_input), args.grad_input_rows);
  }

 private:
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_), visit(inputs_), visit(cos_), visit(sin_), visit(grad_inputs_);
  }

  GroupedRows<const T> grad_outputs_, inputs_, cos_, sin_;
  GroupedRows<T> grad_inputs_;
  int64_t pairs_;
};

void rotated_backward(const CpuArgs<RotatedBackwardArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { backward_parts<RotatedGradientRows<T>>(args, begin, end); });
}

}  // namespace

extern const ToyBackwardKernels kToyBackwardKernels;
const ToyBackwardKernels kToyBackwardKernels = {rotated_backward};

}  // namespace normops::cpu::NORMOPS_ISA
