// Where the scale of a group lies, and where rows begin.

namespace normops::cpu::NORMOPS_ISA {
namespace {

template <class R, class Args>
NORMOPS_INLINE const compute_t<R>* scale_of(const Args& args, int64_t group) {
  return static_cast<const compute_t<R>*>(args.scale) + group * padded_cols(kDType<R>, args.cols);
}

// Whether every row begins with a cache line.
template <class T>
bool begins_with_lines(const T* data, const RowLayout& layout) {
  bool result = reinterpret_cast<uintptr_t>(data) % 64 == 0;
  for (int d = 0; d < layout.dims; d++) result &= layout.strides[d] * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  return result;
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
