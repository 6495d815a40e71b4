// The kernels of gated_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows that
// are gated before they are summed, or after they are normalized.
#include "activation.inl"
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// y = x * rstd * w * a. T is the type of input and output, a the activated gate.
template <class T>
class NormFirstRows {
 public:
  using Number = T;
  using Args = GatedRmsNormArgs;

  struct Numbers : GivenNumbers<T> {
    GateRow<T, const char> gate;
    Activation activation;

    template <class Extent>
    NORMOPS_INLINE Block<T> finished(const Block<T>& y, int64_t column, Extent extent) const {
      return y * activated(gate.load(column, extent), activation);
    }
  };

  struct Row {
    Numbers numbers_;
    auto squares() const { return squares_of(numbers_.data); }
    Numbers numbers() const { return numbers_; }
  };

  NormFirstRows(const GatedRmsNormArgs& args, int64_t row)
      : inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        gates_(static_cast<const char*>(args.gate), args.gate_rows, row),
        gate_dtype_(args.gate_dtype),
        activation_(args.gating.activation) {}

  Row next() { return {{{inputs_.next()}, {gates_.next(), gate_dtype_}, activation_}}; }

 private:
  RowIterator<const T> inputs_;
  RowIterator<const char> gates_;
  const DType gate_dtype_;
  const Activation activation_;
};

// h = x * a, which is held, and y = h * rstd * w.
template <class T>
class GateFirstRows {
 public:
  using Number = T;
  using Args = GatedRmsNormArgs;

  struct Numbers : GivenNumbers<T> {
    const compute_t<T>* held;

    template <class Extent>
    NORMOPS_INLINE Block<T> block(int64_t column, Extent) const {
      return load_held<T>(held + column);
    }
  };

  struct Row {
    const T* x;
    GateRow<T, const char> gate;
    Activation activation;
    compute_t<T>* held;

    auto squares() const {
      return [row = *this](int64_t column, auto extent, const Block<T>& sum) NORMOPS_INLINE_LAMBDA {
        const Block<T> h = load<T>(row.x + column, extent) * activated(row.gate.load(column, extent), row.activation);
        store_held<T>(row.held + column, h);
        return fma(h, h, sum);
      };
    }
    Numbers numbers() const { return {{}, held}; }
  };

  GateFirstRows(const GatedRmsNormArgs& args, int64_t row)
      : inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        gates_(static_cast<const char*>(args.gate), args.gate_rows, row),
        gate_dtype_(args.gate_dtype),
        activation_(args.gating.activation),
        held_(static_cast<compute_t<T>*>(args.held)),
        held_stride_(padded_cols(kDType<T>, args.cols)),
        held_rows_(args.held_rows()) {}

  Row next() {
    compute_t<T>* const held = held_ + count_ * held_stride_;
    if (++count_ == held_rows_) count_ = 0;
    return {inputs_.next(), {gates_.next(), gate_dtype_}, activation_, held};
  }

 private:
  RowIterator<const T> inputs_;
  RowIterator<const char> gates_;
  const DType gate_dtype_;
  const Activation activation_;
  compute_t<T>* const held_;
  const int64_t held_stride_, held_rows_;
  int64_t count_ = 0;
};

// Calls visit.template operator()<T, Source>() with the type and the order of the arguments.
template <class Visit>
void dispatch_gated(const GatedRmsNormArgs& args, Visit visit) {
  dispatch(args.dtype, [&]<class T>() {
    args.gating.norm_before_gate ? visit.template operator()<T, NormFirstRows<T>>()
                                 : visit.template operator()<T, GateFirstRows<T>>();
  });
}

void rows(const GatedRmsNormArgs& args, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class T, class Source>() { forward_rows<T, Source>(args, begin, end); });
}

void sums(const GatedRmsNormArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch_gated(args, [&]<class, class Source>() { forward_sums<Source>(args, row, begin, end, squares); });
}

void columns(const GatedRmsNormArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class T, class Source>() { forward_columns<T, Source>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const GatedRmsNormKernels kGatedRmsNormKernels;
const GatedRmsNormKernels kGatedRmsNormKernels = {rows, sums, columns};

}  // namespace normops::cpu::NORMOPS_ISA
