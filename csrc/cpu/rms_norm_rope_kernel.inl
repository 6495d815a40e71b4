// The kernels of rms_norm_rope, compiled once per instruction set by foreach_isa.h: those of rms_norm, whose rows are
// rotated before they are written.
#include "forward_rows.inl"
#include "rotation.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// T is the type of input and output, W that of cos and sin.
template <class T, class W, Pairing pairing>
class RotatedRows {
 public:
  using Element = T;
  using Args = CpuArgs<RmsNormRopeArgs>;
  static constexpr bool kCostly = false, kFetchesOutput = false;
  static constexpr Ahead kAhead = Ahead::when_streaming;

  struct Rotated : GivenNumbers<T> {
    static constexpr bool kFinishes = true;
    static constexpr Pairing kPairing = pairing;
    PairedColumns paired;
    Angles<T, W> angles;

    Rotated(const T* x, const PairedColumns& paired, const Angles<T, W>& angles)
        : GivenNumbers<T>(x), paired(paired), angles(angles) {}
    template <class Parts, class Extent>
    NORMOPS_INLINE void finish(const Parts& parts, Block<T> (&y)[Parts::kCount], int64_t column, Extent extent) const {
      if constexpr (!std::is_same_v<Parts, OnePart>) angles.template turn<false>(parts, y, column, extent);
    }
  };

  struct Row {
    const T* x;
    const W *cos, *sin;
    const Rotation* rotation;

    auto squares() const { return squares_of(x); }
    auto epilogue() const { return Rotated(x, paired_columns(*rotation), angles_of<T>(*rotation, cos, sin)); }
  };

  struct Rows {
    EvenRows<const T> x;
    EvenRows<const W> cos, sin;
    const Rotation* rotation;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(cos), visit(sin);
    }
    Row row(int) const { return {x.row, cos.row, sin.row, rotation}; }
    NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x.row + x.stride + column); }
  };

  RotatedRows(const Args& args, int64_t row)
      : rotation_(args.rotation),
        x_(static_cast<const T*>(args.input), args.input_rows, row),
        cos_(static_cast<const W*>(args.rotation.cos), args.rotation.rows, row),
        sin_(static_cast<const W*>(args.rotation.sin), args.rotation.rows, row) {}

  template <class Visit>
  void each(Visit visit) {
    visit(x_), visit(cos_), visit(sin_);
  }
  Rows next_even(int64_t count) {
    return {x_.next_even(count), cos_.next_even(count), sin_.next_even(count), &rotation_};
  }

 private:
  const Rotation& rotation_;
  RowIterator<const T> x_;
  RowIterator<const W> cos_, sin_;
};

void rows(const CpuArgs<RmsNormRopeArgs>& args, int64_t begin, int64_t end) {
  dispatch_pair(args.dtype, args.rotation.dtype, [&]<class T, class W>() {
    args.rotation.interleaved ? forward_rows<T, RotatedRows<T, W, Pairing::neighbours>>(args, begin, end)
                              : forward_rows<T, RotatedRows<T, W, Pairing::halves>>(args, begin, end);
  });
}

}  // namespace

extern const RmsNormRopeKernels kRmsNormRopeKernels;
const RmsNormRopeKernels kRmsNormRopeKernels = {rows, nullptr, nullptr};

}  // namespace normops::cpu::NORMOPS_ISA
