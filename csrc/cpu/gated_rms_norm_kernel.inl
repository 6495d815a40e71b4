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

// Finds each row together with the one that follows it, which is to be prefetched: an activation takes so long that the
// processor does not look far enough ahead by itself. The last row is followed by the first.
template <class T>
class GatedRows {
 public:
  struct Pair {
    GatedRow<T> row, ahead;
  };

  GatedRows(const GatedRmsNormArgs& args, int64_t row)
      : inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        gates_(static_cast<const char*>(args.gate), args.gate_rows_in_bytes, row),
        ahead_{inputs_.next(), {gates_.next(), args.gate_dtype}, args.gating.activation} {}

  Pair next() {
    const GatedRow<T> row = ahead_;
    ahead_.x = inputs_.next();
    ahead_.gate.data = gates_.next();
    return {row, ahead_};
  }

 private:
  RowIterator<const T> inputs_;
  RowIterator<const char> gates_;
  GatedRow<T> ahead_;
};

// y = x * rstd * w * a
template <class T>
class NormFirstRows {
 public:
  using Element = T;
  using Args = GatedRmsNormArgs;
  static constexpr bool kCostly = true;

  struct Numbers : GivenNumbers<T> {
    GatedRow<T> row;

    template <class Extent>
    NORMOPS_INLINE Block<T> finished(const Block<T>& y, int64_t column, Extent extent) const {
      return y * row.a(column, extent);
    }
  };

  struct Row {
    GatedRow<T> row;
    const T* ahead;

    auto squares() const {
      return [row = *this](int64_t column, auto extent, const Block<T>& sum) NORMOPS_INLINE_LAMBDA {
        prefetch(row.ahead + column);
        row.row.gate.prefetch(column);
        return squares_of(row.row.x)(column, extent, sum);
      };
    }
    Numbers numbers() const { return {{row.x}, row}; }
  };

  NormFirstRows(const GatedRmsNormArgs& args, int64_t row) : rows_(args, row) {}

  template <int kRows>
  void next(Row (&rows)[kRows]) {
    for (auto& row : rows) {
      const auto pair = rows_.next();
      row = {pair.row, pair.ahead.x};
    }
  }

 private:
  GatedRows<T> rows_;
};

// h = x * a, which is held, and y = h * rstd * w.
template <class T>
class GateFirstRows {
 public:
  using Element = T;
  using Args = GatedRmsNormArgs;
  static constexpr bool kCostly = true;

  struct Numbers : GivenNumbers<T> {
    const compute_t<T>* held;

    template <class Extent>
    NORMOPS_INLINE Block<T> block(int64_t column, Extent) const {
      return load_held<T>(held + column);
    }
  };

  struct Row {
    typename GatedRows<T>::Pair rows;
    compute_t<T>* held;

    auto squares() const {
      return [rows = rows, held = held](int64_t column, auto extent, const Block<T>& sum) NORMOPS_INLINE_LAMBDA {
        prefetch(rows.ahead.x + column);
        rows.ahead.gate.prefetch(column);
        const Block<T> h = load<T>(rows.row.x + column, extent) * rows.row.a(column, extent);
        store_held<T>(held + column, h);
        return fma(h, h, sum);
      };
    }
    Numbers numbers() const { return {{}, held}; }
  };

  GateFirstRows(const GatedRmsNormArgs& args, int64_t row)
      : rows_(args, row),
        held_(static_cast<compute_t<T>*>(args.held)),
        held_stride_(padded_cols(kDType<T>, args.cols)),
        held_rows_(args.held_rows()) {}

  template <int kRows>
  void next(Row (&rows)[kRows]) {
    for (auto& row : rows) {
      row = {rows_.next(), held_ + count_ * held_stride_};
      if (++count_ == held_rows_) count_ = 0;
    }
  }

 private:
  GatedRows<T> rows_;
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
