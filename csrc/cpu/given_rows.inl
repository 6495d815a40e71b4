// The rows of rms_norm_backward: grad_output and input as they are given, and what is made of them.
#include "backward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of grad_output, R that of all other rows.
template <class T, class R, bool kWritten>
class GivenRows {
 public:
  using Element = R;
  using Gradient = T;
  static constexpr bool kCostly = false, kGradRows = kWritten, kFormsGradient = false, kSharedTerms = false;
  static constexpr bool kPlain = true;
  static constexpr auto kRowBytes = static_cast<int64_t>(sizeof(T) + sizeof(R));
  static constexpr int64_t kAllBytes = kRowBytes + sizeof(R);

  struct Row {
    const T* dy;
    const R *x_, *residual;
    R* dx;

    using Outputs = Block<R>;

    struct Terms {
      Block<R> dy, x;

      NORMOPS_INLINE Outputs outputs(const Block<R>& gradient, const Block<R>&, const Block<R>&) const {
        return gradient;
      }
    };

    template <class Extent>
    NORMOPS_INLINE Block<R> x(int64_t column, Extent extent) const {
      return load<R>(x_ + column, extent);
    }
    template <class Extent>
    NORMOPS_INLINE Terms terms(int64_t column, Extent extent) const {
      return {load<R>(dy + column, extent), x(column, extent)};
    }
    template <class Extent>
    NORMOPS_INLINE Terms summed(int64_t column, Extent extent) const {
      return terms(column, extent);
    }
    NORMOPS_INLINE void prefetch_read(int64_t column) const {
      prefetch(x_ + column);
      prefetch(dy + column);
    }
    NORMOPS_INLINE void prefetch_written(int64_t column) const { prefetch(dx + column); }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int64_t column, const Outputs& gradient, Extent extent, Way way) const {
      if constexpr (kWritten) NORMOPS_ISA::store(dx + column, gradient, extent, way);
    }
  };

  GivenRows(const CpuArgs& args, int64_t row)
      : has_residual_(args.has(kGradResidual)),
        has_sums_(args.sums != Sums::formed),
        grad_outputs_(args[kGradOutput], args.weight.groups, row),
        inputs_(args[kInput], args.weight.groups, row),
        grad_residuals_(args[kGradResidual], args.weight.groups, row),
        grad_inputs_(args[kGradInput], args.weight.groups, row),
        square_sums_(args[kSquareSum], args.weight.groups, row),
        dots_(args[kDot], args.weight.groups, row) {}

  void next_rows(int count, int64_t group) {
    each([&](auto& rows) { rows.next_rows(count, group); });
  }
  void next_group() {
    each([](auto& rows) { rows.next_group(); });
  }
  Row next(int r, int) {
    return {grad_outputs_.next<const T>(r), inputs_.next<const R>(r),
            has_residual_ ? grad_residuals_.next<const R>(r) : nullptr, kWritten ? grad_inputs_.next<R>(r) : nullptr};
  }
  SumsOfRow<compute_t<R>> next_sums(int r) { return {square_sums_.next<compute_t<R>>(r), dots_.next<compute_t<R>>(r)}; }

  static bool begins_with_lines(const CpuArgs& args) { return NORMOPS_ISA::begins_with_lines(args[kGradInput]); }

 private:
  // Calls visit(rows) for each tensor that there is.
  template <class Visit>
  void each(Visit visit) {
    visit(grad_outputs_);
    visit(inputs_);
    if (has_residual_) visit(grad_residuals_);
    if (kWritten) visit(grad_inputs_);
    if (has_sums_) visit(square_sums_), visit(dots_);
  }

  const bool has_residual_, has_sums_;
  GroupedRows grad_outputs_, inputs_, grad_residuals_, grad_inputs_, square_sums_, dots_;
};

// Calls visit.template operator()<Source>() with the source that the arguments ask for, if anything is to be written.
template <class Visit>
void dispatch_given(const CpuArgs& args, Visit visit) {
  const bool sums_both = args.has(kGradInput) || args.sums == Sums::wanted;
  if (!sums_both && args.grad_weight_partials == nullptr) return;
  dispatch_pair(args[kGradOutput].dtype, args.dtype(), [&]<class T, class R>() {
    sums_both ? visit.template operator()<GivenRows<T, R, true>>()
              : visit.template operator()<GivenRows<T, R, false>>();
  });
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
