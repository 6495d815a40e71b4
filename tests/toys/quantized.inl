// The kernels of quantized.h, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class T>
class QuantizedRows {
 public:
  using Element = T;
  using Args = CpuArgs<QuantizedArgs>;
  static constexpr bool kCostly = false, kFetchesOutput = false;
  static constexpr Ahead kAhead = Ahead::when_streaming;

  struct Quantized : GivenNumbers<T> {
    static constexpr bool kHasLargest = true;
    float* step;
    Block<T> inverse;

    Quantized(const T* x, float* step) : GivenNumbers<T>(x), step(step) {}
    NORMOPS_INLINE void set_largest(compute_t<T> largest) {
      *step = static_cast<float>(largest / 127);
      inverse = broadcast<T>(largest > 0 ? 127 / largest : 0);
    }
    template <class Extent, class Way>
    NORMOPS_INLINE void store(int8_t* target, const Block<T>& y, Extent extent, Way) const {
      compute_t<T> numbers[kLanes<T>];
      NORMOPS_ISA::store(numbers, y * inverse);
      int64_t lanes = kLanes<T>;
      if constexpr (std::is_same_v<Extent, Part>) lanes = extent.lanes;
      for (int64_t i = 0; i < lanes; i++) target[i] = static_cast<int8_t>(std::nearbyint(numbers[i]));
    }
  };

  struct Row {
    const T* x;
    float* step;

    auto squares() const { return squares_of(x); }
    auto epilogue() const { return Quantized(x, step); }
  };

  struct Rows {
    EvenRows<const T> x;
    EvenRows<float> step;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(step);
    }
    Row row(int) const { return {x.row, step.row}; }
    NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x.row + x.stride + column); }
  };

  QuantizedRows(const Args& args, int64_t row)
      : x_(static_cast<const T*>(args.input), args.input_rows, row), steps_(args.steps, args.step_rows, row) {}

  template <class Visit>
  void each(Visit visit) {
    visit(x_), visit(steps_);
  }
  Rows next_even(int64_t count) { return {x_.next_even(count), steps_.next_even(count)}; }

 private:
  RowIterator<const T> x_;
  RowIterator<float> steps_;
};

void rows(const CpuArgs<QuantizedArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<int8_t, QuantizedRows<T>>(args, begin, end); });
}

}  // namespace

extern const QuantizedKernels kQuantizedKernels;
const QuantizedKernels kQuantizedKernels = {rows};

}  // namespace normops::cpu::NORMOPS_ISA
