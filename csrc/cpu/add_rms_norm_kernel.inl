// The kernels of add_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows that are
// formed while they are summed.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// h = x + residual, or kScaled, alpha * x + residual, rounded to residual's type R: what is written is what is summed
// and normalized. With an alpha of 1, a multiply-add has the bits of an addition.
template <class T, class R, bool kScaled>
class SumRows {
 public:
  using Element = R;
  static constexpr bool kCostly = kScaled;
  static constexpr Ahead kAhead = Ahead::when_streaming;
  static constexpr bool kFetchesOutput = true;

  struct Row {
    const T* x;
    const R* residual;
    R* h;
    compute_t<R> alpha;
    bool casts;

    auto squares() const {
      return [x = x, residual = residual, h = h, alpha = alpha, casts = casts](
                 int64_t column, auto extent, const Block<R>& sum) NORMOPS_INLINE_LAMBDA {
        const Block<R> branch = load<R>(x + column, extent), rest = load<R>(residual + column, extent);
        Block<R> total;
        if constexpr (!kScaled) {
          total = branch + rest;
        } else if (casts) {
          total = rounded<T>(broadcast<R>(alpha) * branch) + rest;
        } else {
          total = fma(broadcast<R>(alpha), branch, rest);
        }
        store(h + column, total, extent);
        const Block<R> rounded = load<R>(h + column, extent);
        return fma(rounded, rounded, sum);
      };
    }

    auto epilogue() const { return GivenNumbers<R>(h); }
  };

  struct Rows {
    EvenRows x, residual, h;
    compute_t<R> alpha;
    bool casts;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(residual), visit(h);
    }
    Row row(int) const { return {x.at<const T>(), residual.at<const R>(), h.at<R>(), alpha, casts}; }
    NORMOPS_INLINE void prefetch(int64_t column) const {
      prefetch_next<T>(x, column);
      prefetch_next<R>(residual, column);
    }
  };

  SumRows(const CpuArgs& args, int64_t row)
      : inputs_(args[kInput], row),
        residuals_(args[kResidual], row),
        sums_(args[kResidualOut], row),
        alpha_(admitted_number<R>(args.alpha)),
        casts_(args.casting.multiplied) {}

  template <class Visit>
  void each(Visit visit) {
    visit(inputs_), visit(residuals_), visit(sums_);
  }
  Rows next_even(int64_t count) {
    return {inputs_.next_even(count), residuals_.next_even(count), sums_.next_even(count), alpha_, casts_};
  }

 private:
  RowIterator inputs_, residuals_, sums_;
  compute_t<R> alpha_;
  bool casts_;
};

// Calls visit.template operator()<T, Source>() with the source that the arguments ask for.
template <class Visit>
void dispatch_sum(const CpuArgs& args, Visit visit) {
  dispatch_pair(args[kInput].dtype, args.dtype(), [&]<class T, class R>() {
    if constexpr (kCommon<T> && kCommon<R>) {
      // Scaled, narrow rows take up to 1.15 of the time on AVX-512.
      if (args.alpha == 1) return visit.template operator()<T, SumRows<T, R, false>>();
    }
    visit.template operator()<T, SumRows<T, R, true>>();
  });
}

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_sum(args, [&]<class T, class Source>() { forward_rows<T, Source>(args, begin, end); });
}

void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch_sum(args, [&]<class, class Source>() { forward_sums<Source>(args, row, begin, end, squares); });
}

void columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch_sum(args, [&]<class T, class Source>() { forward_columns<T, Source>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const ForwardKernels kAddRmsNormKernels;
const ForwardKernels kAddRmsNormKernels = {rows, sums, columns};

}  // namespace normops::cpu::NORMOPS_ISA
