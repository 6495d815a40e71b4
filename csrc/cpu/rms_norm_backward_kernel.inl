// The kernels of rms_norm_backward, compiled once per instruction set by foreach_isa.h.
#include "given_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

void rows(const CpuArgs& args, int64_t begin, int64_t end) {
  dispatch_given(args, [&]<class Source>() { backward_parts<Source>(args, begin, end); });
}

void sums(const CpuArgs& args, int64_t row, int64_t begin, int64_t end, double* squares, double* dots) {
  dispatch_given(args, [&]<class Source>() { backward_sums<Source>(args, row, begin, end, squares, dots); });
}

void columns(const CpuArgs& args, int64_t row, double square_sum, double dot, int64_t begin, int64_t end) {
  dispatch_given(args, [&]<class Source>() { backward_columns<Source>(args, row, square_sum, dot, begin, end); });
}

template <class T, class W>
void grad_weight_columns(const compute_t<T>* partials, int64_t chunks, int64_t stride, W* grad_weight, int64_t count) {
  for_each_block<T>(0, count, [&](int64_t column, auto extent) NORMOPS_INLINE_LAMBDA {
    Block<T> total = {};
    for (int64_t chunk = 0; chunk < chunks; chunk++) total = total + load_held<T>(partials + chunk * stride + column);
    store(grad_weight + column, total, extent);
  });
}

void grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t chunks, int64_t stride,
                 void* grad_weight, int64_t count) {
  dispatch(dtype, [&]<class T>() {
    dispatch(weight_dtype, [&]<class W>() {
      grad_weight_columns<T>(static_cast<const compute_t<T>*>(partials), chunks, stride, static_cast<W*>(grad_weight),
                             count);
    });
  });
}

}  // namespace

extern const RmsNormBackwardKernels kRmsNormBackwardKernels;
const RmsNormBackwardKernels kRmsNormBackwardKernels = {{rows, sums, columns}, grad_weight};

}  // namespace normops::cpu::NORMOPS_ISA
