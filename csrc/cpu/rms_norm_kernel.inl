// The kernels of rms_norm, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class T, class W>
void scale_columns(const W* weight, double weight_offset, compute_t<T>* scale, int64_t count) {
  // Adding -0 changes nothing, adding 0 would change the sign of a weight that is -0.
  const Block<T> offset = broadcast<T>(admitted_number<T>(weight_offset == 0 ? -0.0 : weight_offset));
  for_each_block<T>(0, count, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    store_held<T>(scale + column, load<T>(weight + column, extent) + offset);
  });
}

void scale(DType dtype, DType weight_dtype, const void* weight, double weight_offset, void* scale, int64_t count) {
  dispatch(dtype, [&]<class T>() {
    dispatch(weight_dtype, [&]<class W>() {
      scale_columns<T>(static_cast<const W*>(weight), weight_offset, static_cast<compute_t<T>*>(scale), count);
    });
  });
}

// The rows of the input, the sums of whose squares are given.
template <class T>
class SummedRows : public InputRows<T> {
 public:
  static constexpr bool kGivesSums = true;

  struct Rows : InputRows<T>::Rows {
    EvenRows square_sum;
    int64_t size;

    template <class Visit>
    void each(Visit visit) {
      visit(this->x), visit(square_sum);
    }
    compute_t<T> rstd(double eps) const {
      return rstd_of<T>(admitted_number<T>(*square_sum.at<const compute_t<T>>()), size, eps);
    }
  };

  SummedRows(const CpuArgs& args, int64_t row)
      : InputRows<T>(args, row), square_sums_(args[kSquareSum], row), size_(args.size) {}

  template <class Visit>
  void each(Visit visit) {
    InputRows<T>::each(visit), visit(square_sums_);
  }
  Rows next_even(int64_t count) { return {InputRows<T>::next_even(count), square_sums_.next_even(count), size_}; }

 private:
  RowIterator square_sums_;
  int64_t size_;
};

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch(args.dtype(), [&]<class T>() {
    switch (args.sums) {
      case Sums::formed:
        return forward_rows<T, InputRows<T>>(args, begin, end);
      case Sums::given:
        return forward_rows<T, SummedRows<T>>(args, begin, end);
      case Sums::wanted:
        return sum_rows<InputRows<T>>(args, begin, end);
    }
  });
}

void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch(args.dtype(), [&]<class T>() { forward_sums<InputRows<T>>(args, row, begin, end, squares); });
}

void columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch(args.dtype(), [&]<class T>() { forward_columns<T, InputRows<T>>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale, {rows, sums, columns}};

}  // namespace normops::cpu::NORMOPS_ISA
