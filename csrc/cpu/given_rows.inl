// The rows of a backward as they are given, which are two tensors and what is made of them.
#include "backward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The rows of grad_output and input as they are given. T is the type of grad_output, R that of all other rows.
template <class T, class R, bool kGradInput, bool kResidual, class OperatorArgs = RmsNormBackwardArgs>
class GivenRows {
 public:
  using Element = R;
  using Gradient = T;
  using Args = CpuArgs<OperatorArgs>;
  static constexpr bool kCostly = false, kGradRows = kGradInput, kFormsGradient = false, kSharedTerms = false;
  static constexpr auto kRowBytes = static_cast<int64_t>(sizeof(T) + sizeof(R));
  static constexpr int64_t kAllBytes = kRowBytes + sizeof(R);

  struct Row {
    const T* dy;
    const R *x_, *residual;
    R* dx;

    using Outputs = Block<R>;

    template <class Extent>
    struct Terms {
      Block<R> dy, x;
      const R* residual;  // this block of it
      Extent extent;

      NORMOPS_INLINE Block<R> rest(const Block<R>& minus_c) const {
        if constexpr (kResidual) return fma(minus_c, x, load<R>(residual, extent));
        return minus_c * x;
      }
      NORMOPS_INLINE Outputs outputs(const Block<R>& gradient, const Block<R>&, const Block<R>&) const {
        return gradient;
      }
    };

    template <class Extent>
    NORMOPS_INLINE Block<R> x(int64_t column, Extent extent) const {
      return load<R>(x_ + column, extent);
    }
    template <class Extent>
    NORMOPS_INLINE Terms<Extent> terms(int64_t column, Extent extent) const {
      return {load<R>(dy + column, extent), x(column, extent), kResidual ? residual + column : nullptr, extent};
    }
    template <class Extent>
    NORMOPS_INLINE Terms<Extent> summed(int64_t column, Extent extent) const {
      return terms(column, extent);
    }
    NORMOPS_INLINE void prefetch_read(int64_t column) const {
      prefetch(x_ + column);
      prefetch(dy + column);
    }
    NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(dx + column); }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, Way way) const {
      if constexpr (kGradInput) NORMOPS_ISA::store(dx + column, gradient, extent, way);
    }
  };

  GivenRows(const Args& args, int64_t row)
      : grad_outputs_(static_cast<const T*>(args.grad_output), args.grad_output_rows, args.weight.groups, row),
        inputs_(static_cast<const R*>(args.input), args.input_rows, args.weight.groups, row),
        grad_residuals_(static_cast<const R*>(args.grad_residual), args.grad_residual_rows, args.weight.groups, row),
        grad_inputs_(static_cast<R*>(args.grad_input), args.grad_input_rows, args.weight.groups, row) {}

  void next_rows(int count, int64_t group) {
    each([&](auto& rows) { rows.next_rows(count, group); });
  }
  void next_group() {
    each([](auto& rows) { rows.next_group(); });
  }
  Row next(int r, int) {
    return {grad_outputs_.next(r), inputs_.next(r), kResidual ? grad_residuals_.next(r) : nullptr,
            kGradInput ? grad_inputs_.next(r) : nullptr};
  }

  static bool begins_with_lines(const Args& args) {
    return NORMOPS_ISA::begins_with_lines(static_cast<const R*>(args.grad_input), args.grad_input_rows);
  }

 private:
  // Calls visit(rows) for each tensor that there is.
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_);
    visit(inputs_);
    if (kResidual) visit(grad_residuals_);
    if (kGradInput) visit(grad_inputs_);
  }

  GroupedRows<const T> grad_outputs_;
  GroupedRows<const R> inputs_, grad_residuals_;
  GroupedRows<R> grad_inputs_;
};

// Calls visit.template operator()<Source>() with the source that the arguments ask for, if anything is to be written.
template <template <class T, class R, bool kGradInput, bool kResidual> class Source, class Args, class Visit>
void dispatch_given(const Args& args, Visit visit) {
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    if (args.grad_input == nullptr) {
      if (args.grad_weight_partials != nullptr) visit.template operator()<Source<T, R, false, false>>();
    } else {
      args.grad_residual == nullptr ? visit.template operator()<Source<T, R, true, false>>()
                                    : visit.template operator()<Source<T, R, true, true>>();
    }
  });
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
