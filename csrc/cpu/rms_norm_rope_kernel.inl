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
    EvenRows x, cos, sin;
    const Rotation* rotation;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(cos), visit(sin);
    }
    Row row(int) const { return {x.at<const T>(), cos.at<const W>(), sin.at<const W>(), rotation}; }
    NORMOPS_INLINE void prefetch(int64_t column) const { prefetch_next<T>(x, column); }
  };

  RotatedRows(const CpuArgs& args, int64_t row)
      : rotation_(args.rotation), x_(args[kInput], row), cos_(args[kCos], row), sin_(args[kSin], row) {}

  template <class Visit>
  void each(Visit visit) {
    visit(x_), visit(cos_), visit(sin_);
  }
  Rows next_even(int64_t count) {
    return {x_.next_even(count), cos_.next_even(count), sin_.next_even(count), &rotation_};
  }

 private:
  const Rotation& rotation_;
  RowIterator x_, cos_, sin_;
};

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_pair(args.dtype(), args[kCos].dtype, [&]<class T, class W>() {
    args.rotation.interleaved ? forward_rows<T, RotatedRows<T, W, Pairing::neighbours>>(args, begin, end)
                              : forward_rows<T, RotatedRows<T, W, Pairing::halves>>(args, begin, end);
  });
}

}  // namespace

extern const ForwardKernels kRmsNormRopeKernels;
const ForwardKernels kRmsNormRopeKernels = {rows, nullptr, nullptr};

}  // namespace normops::cpu::NORMOPS_ISA
