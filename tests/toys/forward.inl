// The forward kernels of toys.h, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"
#include "turn.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Each element with its neighbour's place: elements 2 * i and 2 * i + 1 change theirs.
template <class R, int... kLane>
NORMOPS_INLINE Block<R> with_neighbours(const Block<R>& block, std::integer_sequence<int, kLane...>) {
  if constexpr (kEvenOdd<R>) return {block.v[1], block.v[0]};
  Block<R> result;
  for (int i = 0; i < block.kVectors; i++) result.v[i] = shuffle<(kLane ^ 1)...>(block.v[i], block.v[i]);
  return result;
}

template <class R>
using VectorLanes = std::make_integer_sequence<int, Block<R>::kVectorLanes>;

template <class T, bool kPairs>
class RotatedRows {
 public:
  using Element = T;
  using Args = CpuArgs<RotatedArgs>;
  static constexpr bool kCostly = false, kFetchesOutput = false;
  static constexpr Ahead kAhead = Ahead::when_streaming;

  struct Rotated : GivenNumbers<T> {
    static constexpr int kParts = kPairs ? 2 : 1;
    const T *cos, *sin;
    int64_t pairs;

    Rotated(const T* x, const T* cos, const T* sin, int64_t pairs)
        : GivenNumbers<T>(x), cos(cos), sin(sin), pairs(pairs) {}
    template <class Extent>
    NORMOPS_INLINE void finish(Block<T> (&y)[2], int64_t column, Extent extent) const {
      turn<false>(y[0], y[1], load<T>(cos + column, extent), load<T>(sin + column, extent));
    }
    template <class Extent>
    NORMOPS_INLINE void finish(Block<T> (&y)[1], int64_t column, Extent extent) const {
      if constexpr (kPairs) return;  // those beyond the pairs
      y[0] = fma(y[0], load<T>(cos + column, extent),
                 with_neighbours(y[0], VectorLanes<T>()) * load<T>(sin + column, extent));
    }
  };

  struct Row {
    const T *x, *cos, *sin;
    int64_t pairs;

    auto squares() const { return squares_of(x); }
    auto epilogue() const { return Rotated(x, cos, sin, pairs); }
  };

  struct Rows {
    EvenRows<const T> x, cos, sin;
    int64_t pairs;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(cos), visit(sin);
    }
    Row row(int) const { return {x.row, cos.row, sin.row, pairs}; }
    NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x.row + x.stride + column); }
  };

  RotatedRows(const Args& args, int64_t row)
      : x_(static_cast<const T*>(args.input), args.input_rows, row),
        cos_(static_cast<const T*>(args.cos), args.angle_rows, row),
        sin_(static_cast<const T*>(args.sin), args.angle_rows, row),
        pairs_(args.pairs) {}

  static int64_t pairs(const Args& args)
    requires kPairs
  {
    return args.pairs;
  }

  template <class Visit>
  void each(Visit visit) {
    visit(x_), visit(cos_), visit(sin_);
  }
  Rows next_even(int64_t count) { return {x_.next_even(count), cos_.next_even(count), sin_.next_even(count), pairs_}; }

 private:
  RowIterator<const T> x_, cos_, sin_;
  int64_t pairs_;
};

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

int64_t held_cols_of(DType dtype, int64_t cols, int64_t pairs) {
  int64_t result = 0;
  dispatch(dtype, [&]<class T>() { result = PairedParts<T>(pairs).held_cols(cols); });
  return result;
}

// Calls visit(natural, held) for the parts of a row and of what is held, each in its order.
template <class T, class Visit>
void each_part(int64_t cols, int64_t pairs, Visit visit) {
  each_stretch<T, 2>(pairs, 0, cols, [&](const auto& parts, int64_t begin, int64_t end) {
    for (int p = 0; p < parts.kCount; p++) {
      for_each_block<T>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
        visit(parts.column(column, p), parts.held(column, p), extent);
      });
    }
  });
}

void to_pairs(DType dtype, const void* row, int64_t cols, int64_t pairs, void* held) {
  dispatch(dtype, [&]<class T>() {
    each_part<T>(cols, pairs, [&](int64_t column, int64_t place, auto extent) NORMOPS_INLINE_LAMBDA {
      const auto* const numbers = static_cast<const compute_t<T>*>(row);
      store_held<T>(static_cast<compute_t<T>*>(held) + place, load<T>(numbers + column, extent));
    });
  });
}

void from_pairs(DType dtype, const void* held, int64_t cols, int64_t pairs, void* row) {
  dispatch(dtype, [&]<class T>() {
    each_part<T>(cols, pairs, [&](int64_t column, int64_t place, auto extent) NORMOPS_INLINE_LAMBDA {
      const auto* const numbers = static_cast<const compute_t<T>*>(held);
      store(static_cast<compute_t<T>*>(row) + column, load_held<T>(numbers + place), extent);
    });
  });
}

void rotated(const CpuArgs<RotatedArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() {
    args.pairs > 0 ? forward_rows<T, RotatedRows<T, true>>(args, begin, end)
                   : forward_rows<T, RotatedRows<T, false>>(args, begin, end);
  });
}

void quantized(const CpuArgs<QuantizedArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<int8_t, QuantizedRows<T>>(args, begin, end); });
}

}  // namespace

extern const ToyKernels kToyKernels;
const ToyKernels kToyKernels = {held_cols_of, to_pairs, from_pairs, rotated, quantized};

}  // namespace normops::cpu::NORMOPS_ISA
