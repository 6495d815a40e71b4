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
