// The kernels of rms_norm, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class T, class W>
void scale_columns(const W* weight, double weight_offset, compute_t<T>* scale, int64_t begin, int64_t end) {
  // Adding -0 changes nothing, adding 0 would change the sign of a weight that is -0.
  const Block<T> offset = broadcast<T>(static_cast<compute_t<T>>(weight_offset == 0 ? -0.0 : weight_offset));
  for_each_block<T>(begin, end, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    store_held<T>(scale + column, canonical_nans(load<T>(weight + column, extent) + offset));
  });
}

void scale(DType dtype, DType weight_dtype, const void* weight, double weight_offset, int64_t cols, void* scale,
           int64_t group, int64_t begin, int64_t end) {
  dispatch(dtype, [&]<class T>() {
    auto* const scale_row = static_cast<compute_t<T>*>(scale) + group * padded_cols(dtype, cols);
    dispatch(weight_dtype, [&]<class W>() {
      scale_columns<T>(static_cast<const W*>(weight) + group * cols, weight_offset, scale_row, begin, end);
    });
  });
}

void rows(const CpuArgs<RmsNormArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<T, InputRows<T>>(args, begin, end); });
}

void sums(const CpuArgs<RmsNormArgs>& args, int64_t row, int64_t begin, int64_t end, double* squares) {
  dispatch(args.dtype, [&]<class T>() { forward_sums<InputRows<T>>(args, row, begin, end, squares); });
}

void columns(const CpuArgs<RmsNormArgs>& args, int64_t row, double square_sum, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_columns<T, InputRows<T>>(args, row, square_sum, begin, end); });
}

}  // namespace

extern const RmsNormKernels kRmsNormKernels;
const RmsNormKernels kRmsNormKernels = {scale, {rows, sums, columns}};

}  // namespace normops::cpu::NORMOPS_ISA
