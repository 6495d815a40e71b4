// Where the scale of a group lies, where rows begin, and which of their columns are formed together.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Whether every row begins with a cache line.
template <class T>
bool begins_with_lines(const T* data, const RowLayout& layout) {
  bool result = reinterpret_cast<uintptr_t>(data) % 64 == 0;
  for (int d = 0; d < layout.dims; d++) result &= layout.strides[d] * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  return result;
}

// The blocks of a row that are formed together: where they begin in the row, and in what kernels hold in an order of
// their own, as they do the scale.
struct OnePart {
  static constexpr int kCount = 1;
  int64_t held_offset = 0;

  NORMOPS_INLINE int64_t column(int64_t column, int) const { return column; }
  NORMOPS_INLINE int64_t held(int64_t column, int) const { return column + held_offset; }
};

// Two blocks, as the columns c < pairs are paired with c + pairs. What is held has the first halves of the pairs, the
// second ones, and the columns without a pair one after another, each padded to whole blocks.
template <class R>
struct PairedParts {
  static constexpr int kCount = 2;
  int64_t pairs, held_pairs;

  explicit PairedParts(int64_t pairs) : pairs(pairs), held_pairs(padded_cols(kDType<R>, pairs)) {}
  NORMOPS_INLINE int64_t column(int64_t column, int p) const { return column + p * pairs; }
  NORMOPS_INLINE int64_t held(int64_t column, int p) const { return column + p * held_pairs; }
  OnePart rest() const { return {2 * (held_pairs - pairs)}; }
  int64_t held_cols(int64_t cols) const { return 2 * held_pairs + padded_cols(kDType<R>, cols - 2 * pairs); }
};

// How many blocks of a row the kernels of a Source form together, and how many pairs there are.
template <class Source>
constexpr int kParts = requires(const typename Source::Args& args) { Source::pairs(args); } ? 2 : 1;

template <class Source>
int64_t pairs_of([[maybe_unused]] const typename Source::Args& args) {
  if constexpr (kParts<Source> == 2) return Source::pairs(args);
  return 0;
}

// The numbers of a group's scale, and of its partial.
template <class Source>
int64_t held_cols(const typename Source::Args& args) {
  using R = typename Source::Element;
  return kParts<Source> == 2 ? PairedParts<R>(pairs_of<Source>(args)).held_cols(args.cols)
                             : padded_cols(kDType<R>, args.cols);
}

template <class Source>
NORMOPS_INLINE auto* scale_of(const typename Source::Args& args, int64_t group) {
  return static_cast<const compute_t<typename Source::Element>*>(args.scale) + group * held_cols<Source>(args);
}

// Calls visit(parts, begin, end) for the stretches of columns [begin, end) that are formed in the same way. With pairs,
// these are all columns of the row, and the stretch of the pairs counts their first halves.
template <class R, int kParts, class Visit>
NORMOPS_INLINE void each_stretch([[maybe_unused]] int64_t pairs, int64_t begin, int64_t end, Visit visit) {
  if constexpr (kParts == 1) {
    visit(OnePart(), begin, end);
  } else {
    const PairedParts<R> paired(pairs);
    visit(paired, begin, pairs);
    visit(paired.rest(), 2 * pairs, end);
  }
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
