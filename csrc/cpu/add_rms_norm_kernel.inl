// The kernels of add_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows that are
// formed while they are summed.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// h = x + residual, rounded to residual's type R: what is written is what is summed and normalized.
template <class T, class R>
class SumRows {
 public:
  using Element = R;
  using Args = AddRmsNormArgs;
  static constexpr bool kCostly = false;

  struct Row {
    const T* x;
    const R* residual;
    R* h;

    auto squares() const {
      return [x = x, residual = residual, h = h](int64_t column, auto extent, const Block<R>& sum)
                 NORMOPS_INLINE_LAMBDA {
                   store(h + column, load<R>(x + column, extent) + load<R>(residual + column, extent), extent);
                   const Block<R> rounded = load<R>(h + column, extent);
                   return fma(rounded, rounded, sum);
                 };
    }

    GivenNumbers<R> numbers() const { return {h}; }
  };

  SumRows(const AddRmsNormArgs& args, int64_t row)
      : inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        residuals_(static_cast<const R*>(args.residual), args.residual_rows, row),
        sums_(static_cast<R*>(args.residual_out), args.residual_out_rows, row) {}

  template <int kRows>
  void next(Row (&rows)[kRows]) {
    const T* x[kRows];
    const R* residual[kRows];
    R* h[kRows];
    inputs_.next(x);
    residuals_.next(residual);
    sums_.next(h);
    for (int r = 0; r < kRows; r++) rows[r] = {x[r], residual[r], h[r]};
  }

 private:
  RowIterator<const T, kNarrowTile> inputs_;
  RowIterator<const R, kNarrowTile> residuals_;
  RowIterator<R, kNarrowTile> sums_;
};

void rows(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  dispatch_pair(args.dtype, args.residual_dtype,
                [&]<class T, class R>() { forward_rows<T, SumRows<T, R>>(args, begin, end); });
}

void sums(const AddRmsNormArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch_pair(args.dtype, args.residual_dtype,
                [&]<class T, class R>() { forward_sums<SumRows<T, R>>(args, row, begin, end, squares); });
}

void columns(const AddRmsNormArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch_pair(args.dtype, args.residual_dtype,
                [&]<class T, class R>() { forward_columns<T, SumRows<T, R>>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const AddRmsNormKernels kAddRmsNormKernels;
const AddRmsNormKernels kAddRmsNormKernels = {rows, sums, columns};

}  // namespace normops::cpu::NORMOPS_ISA
