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

template <class T, bool kWithSums = false>
struct RmsNorm : InputRow<T> {
  static constexpr auto kTensors = [] {
    if constexpr (kWithSums) {
      return std::array{kInput, kSquareSum};
    } else {
      return std::array{kInput};
    }
  }();
  using WithSums = RmsNorm<T, true>;

  template <class Rows, class Shared>
  NORMOPS_INLINE RmsNorm(const Rows& rows, const Shared&, int) : InputRow<T>(rows) {}
};

struct Variants {
  template <class Visit>
  static void choose(const CpuArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() { visit.template operator()<RmsNorm<T>>(); });
  }
};

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale, Forward<Variants>::kKernels};

}  // namespace normops::cpu::NORMOPS_ISA
