// The kernels of gated_rms_norm, compiled once per instruction set by foreach_isa.h: those of rms_norm, on rows that
// are gated before they are summed, or after they are normalized.
#include "activation.inl"
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// A row of the input and of its gate. T is the type of input and output, a the activated gate.
template <class T>
struct GatedRow {
  const T* x;
  GateRow<T, const char> gate;
  Activation activation;

  template <class Extent>
  NORMOPS_INLINE Block<T> a(int64_t column, Extent extent) const {
    return activated(gate.load(column, extent), activation);
  }
};

// The rows of the input and of its gate. Each row is prefetched while the activation of the one before it is formed,
// which takes so long that the processor does not look far enough ahead by itself.
template <class T>
struct GatedRows {
  EvenRows x, gate;
  DType gate_dtype;
  Activation activation;

  template <class Visit>
  void each(Visit visit) {
    visit(x), visit(gate);
  }
  GatedRow<T> row() const { return {x.at<const T>(), {gate.row, gate_dtype}, activation}; }
  NORMOPS_INLINE void prefetch(int64_t column) const {
    prefetch_next<T>(x, column);
    GateRow<T, const char>{gate.row + gate.stride, gate_dtype}.prefetch(column);
  }
};

template <class T>
class GatedSource {
 public:
  using Element = T;
  static constexpr bool kCostly = true;

  GatedSource(const CpuArgs& args, int64_t row) : args_(args), inputs_(args[kInput], row), gates_(args[kGate], row) {}

  template <class Visit>
  void each(Visit visit) {
    visit(inputs_), visit(gates_);
  }

 protected:
  GatedRows<T> next_gated(int64_t count) {
    return {inputs_.next_even(count), gates_.next_even(count), args_[kGate].dtype, args_.gating.activation};
  }
  const CpuArgs& args_;

 private:
  RowIterator inputs_, gates_;
};

// y = x * rstd * w * a
template <class T>
struct NormFirstRows : GatedSource<T> {
  static constexpr Ahead kAhead = Ahead::when_written;
  static constexpr bool kFetchesOutput = false;

  struct Gated : GivenNumbers<T> {
    static constexpr bool kFinishes = true;
    GatedRow<T> row;

    explicit Gated(const GatedRow<T>& row) : GivenNumbers<T>(row.x), row(row) {}
    template <class Extent>
    NORMOPS_INLINE void finish(const OnePart&, Block<T> (&y)[1], int64_t column, Extent extent) const {
      y[0] = y[0] * row.a(column, extent);
    }
  };

  struct Row : GatedRow<T> {
    auto squares() const { return squares_of(this->x); }
    auto epilogue() const { return Gated(*this); }
  };

  struct Rows : GatedRows<T> {
    Row row(int) const { return {GatedRows<T>::row()}; }
  };

  using GatedSource<T>::GatedSource;
  Rows next_even(int64_t count) { return {this->next_gated(count)}; }
};

// h = x * a, which is held, and y = h * rstd * w.
template <class T>
class GateFirstRows : public GatedSource<T> {
 public:
  static constexpr Ahead kAhead = Ahead::when_summed;
  static constexpr bool kInOutput = std::is_same_v<T, compute_t<T>>;
  static constexpr bool kFetchesOutput = !kInOutput;

  struct Held : Epilogue<T> {
    const compute_t<T>* held;

    explicit Held(const compute_t<T>* held) : held(held) {}
    template <class Extent>
    NORMOPS_INLINE Block<T> block(int64_t column, Extent extent) const {
      if constexpr (kInOutput) return load<T>(held + column, extent);
      return load_held<T>(held + column);
    }
  };

  struct Row : GatedRow<T> {
    compute_t<T>* held;

    auto squares() const {
      return [row = *this](int64_t column, auto extent, const Block<T>& sum) NORMOPS_INLINE_LAMBDA {
        const Block<T> h = load<T>(row.x + column, extent) * row.a(column, extent);
        if constexpr (kInOutput) {
          store(row.held + column, h, extent);
        } else {
          store_held<T>(row.held + column, h);
        }
        return fma(h, h, sum);
      };
    }
    auto epilogue() const { return Held(held); }
  };

  struct Rows : GatedRows<T> {
    EvenRows held;
    int64_t held_stride;  // between the rows of a tile

    template <class Visit>
    void each(Visit visit) {
      GatedRows<T>::each(visit);
      visit(held);
    }
    Row row(int r) const { return {GatedRows<T>::row(), held.template at<compute_t<T>>() + r * held_stride}; }
  };

  GateFirstRows(const CpuArgs& args, int64_t row)
      : GatedSource<T>(args, row),
        holds_in_output_(holds_in_output(args)),
        held_{static_cast<char*>(args.held)},
        held_stride_(padded_cols(kDType<T>, args.cols)),
        outputs_(args[kOutput], row) {}

  template <class Visit>
  void each(Visit visit) {
    GatedSource<T>::each(visit);
    if (holds_in_output_) visit(outputs_);
  }
  Rows next_even(int64_t count) {
    if (holds_in_output_) return {this->next_gated(count), outputs_.next_even(count), 0};
    return {this->next_gated(count), held_, held_stride_};
  }

 private:
  const bool holds_in_output_;
  const EvenRows held_;
  const int64_t held_stride_;
  RowIterator outputs_;
};

// Calls visit.template operator()<T, Source>() with the type and the order of the arguments.
template <class Visit>
void dispatch_gated(const CpuArgs& args, Visit visit) {
  dispatch(args.dtype(), [&]<class T>() {
    args.gating.norm_before_gate ? visit.template operator()<T, NormFirstRows<T>>()
                                 : visit.template operator()<T, GateFirstRows<T>>();
  });
}

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class T, class Source>() { forward_rows<T, Source>(args, begin, end); });
}

void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch_gated(args, [&]<class, class Source>() { forward_sums<Source>(args, row, begin, end, squares); });
}

void columns(const CpuArgs& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch_gated(args, [&]<class T, class Source>() { forward_columns<T, Source>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const ForwardKernels kGatedRmsNormKernels;
const ForwardKernels kGatedRmsNormKernels = {rows, sums, columns};

}  // namespace normops::cpu::NORMOPS_ISA
