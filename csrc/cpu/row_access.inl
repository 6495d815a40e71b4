// Where the scale of a group lies, where rows begin, and which of their columns are formed together.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Whether every row begins with a cache line.
inline bool begins_with_lines(const RowsArg& rows) {
  bool result = reinterpret_cast<uintptr_t>(rows.data) % 64 == 0;
  for (int d = 0; d < rows.layout.dims; d++) result &= rows.layout.strides[d] % 64 == 0;
  return result;
}

// Where an operator lists a tensor; -1 if it does not.
template <class RowOp>
constexpr int place_of(TensorIndex tensor) {
  for (int i = 0; i < static_cast<int>(std::size(RowOp::kTensors)); i++) {
    if (RowOp::kTensors[i] == tensor) return i;
  }
  return -1;
}

// The segments of a row: the columns before those that are formed in pairs, these, and those behind.
constexpr int kBefore = 0, kPaired = 1, kBehind = 2, kSegments = 3;

// The blocks of a row that are formed together: where they begin in the row, and in packed numbers. Here, each block by
// itself.
struct SingleBlock {
  static constexpr int kCount = 1;
  int64_t packed_offset = 0;
  int segment = kBefore;

  NORMOPS_INLINE int64_t column(int64_t column, int) const { return column; }
  NORMOPS_INLINE int64_t packed(int64_t column, int) const { return column + packed_offset; }
};

// Two blocks: the second columns of pairs lie behind the first ones.
struct HalfPair {
  static constexpr int kCount = 2;
  int64_t pairs, packed_offset, packed_pairs;
  int segment = kPaired;

  NORMOPS_INLINE int64_t column(int64_t column, int p) const { return column + p * pairs; }
  NORMOPS_INLINE int64_t packed(int64_t column, int p) const { return column + packed_offset + p * packed_pairs; }
};

// A block of pairs of neighbours.
struct InterleavedBlock : SingleBlock {};

// How columns are formed: each by itself, or those that paired_columns() tells in pairs.
enum class Pairing { none, rotate_half, interleaved };

template <class RowOp>
constexpr Pairing pairing_of() {
  if constexpr (requires { RowOp::kPairing; }) return RowOp::kPairing;
  return Pairing::none;
}

// Whether cases are chosen between at run time, so that there is less code: where blocks are costly, or types are rare.
// T is the type of what is given or written beside the rows of the operator.
template <class RowOp, class T>
constexpr bool branches_at_run_time() {
  return RowOp::kComputeBound || !kHasFastPath<typename RowOp::Element> || !kHasFastPath<T>;
}

template <class RowOp>
ScaleLayout scale_layout(const CpuArgs& args) {
  return {kDType<typename RowOp::Element>, args.cols, paired_columns(args.rotation)};
}

// The numbers of a group's scale, and of its sum of rows.
template <class RowOp>
int64_t packed_cols(const CpuArgs& args) {
  return scale_layout<RowOp>(args).packed_cols();
}

template <class RowOp>
NORMOPS_INLINE auto* scale_of(const CpuArgs& args, int64_t group) {
  return static_cast<const compute_t<typename RowOp::Element>*>(args.scale) +
         (group - args.first_group) * packed_cols<RowOp>(args);
}

// Calls visit(parts, begin, end) for the segments of columns [begin, end) that are formed in the same way. With pairs,
// these are all columns of the row, the segment of two parts counts the first columns of pairs, and pairs come first.
template <class R, Pairing pairing, class Visit>
NORMOPS_INLINE void each_segment([[maybe_unused]] const RotaryColumns& paired, int64_t begin, int64_t end,
                                 Visit visit) {
  if constexpr (pairing == Pairing::none) {
    visit(SingleBlock(), begin, end);
  } else {
    constexpr DType dtype = kDType<R>;
    const int64_t first = paired.offset, pairs = paired.pairs, behind = first + 2 * pairs;
    const int64_t packed = padded_cols(dtype, first) - first;  // how far a packed column is from its column
    int64_t packed_behind;
    if constexpr (pairing == Pairing::rotate_half) {
      const int64_t packed_pairs = padded_cols(dtype, pairs);
      visit(HalfPair{pairs, packed, packed_pairs}, first, first + pairs);
      packed_behind = packed + 2 * (packed_pairs - pairs);
    } else {
      visit(InterleavedBlock{{packed, kPaired}}, first, behind);
      packed_behind = packed + padded_cols(dtype, 2 * pairs) - 2 * pairs;
    }
    if (first == 0 && behind >= end) [[likely]]
      return;
    const auto visit_one = [&](int segment) NORMOPS_INLINE_LAMBDA {
      const bool is_behind = segment == kBehind;
      visit(SingleBlock{is_behind ? packed_behind : 0, segment}, is_behind ? behind : begin, is_behind ? end : first);
    };
    if constexpr (kEvenOdd<R>) {
      if (first > 0) visit_one(kBefore);
      if (behind < end) visit_one(kBehind);
    } else {
      // Columns without a pair are few: one piece of code. In bfloat16 that takes 1.1 of the time of the others.
      for (int segment = first > 0 ? kBefore : kBehind; segment <= (behind < end ? kBehind : kBefore);
           segment += kBehind) {
        visit_one(segment);
      }
    }
  }
}

// A row beside rows of T: of a gate, its gradient, or a bias. It may be of another type than T, which is known only
// when the kernel runs: kernels for each pair of types would be too many.
template <class T, class Byte>
struct AnyRow {
  Byte* data;  // null if not wanted
  DType dtype;

  template <class Extent>
  NORMOPS_INLINE Block<T> load(int64_t column, Extent extent) const {
    Block<T> block;
    visit([&](auto* row) NORMOPS_INLINE_LAMBDA { block = NORMOPS_ISA::load<T>(row + column, extent); });
    return block;
  }

  template <class Extent, class StorePolicy>
  NORMOPS_INLINE void store(int64_t column, const Block<T>& block, Extent extent, StorePolicy way) const {
    visit([&](auto* row) NORMOPS_INLINE_LAMBDA { NORMOPS_ISA::store(row + column, block, extent, way); });
  }

  NORMOPS_INLINE void prefetch(int64_t column) const {
    NORMOPS_ISA::prefetch(data + column * (dtype == kDType<T> ? sizeof(T) : sizeof(T) == 2 ? 4 : 2));
  }

 private:
  template <class Visit>
  NORMOPS_INLINE void visit(Visit visit) const {
    if (dtype == kDType<T>) [[likely]]
      return visit(as<T>());
    if constexpr (sizeof(T) == 2) return visit(as<float>());
    if constexpr (std::is_same_v<T, float>) {
      dtype == DType::bfloat16 ? visit(as<bfloat16>()) : visit(as<float16>());
    }
  }
  template <class G>
  NORMOPS_INLINE auto* as() const {
    return reinterpret_cast<std::conditional_t<std::is_const_v<Byte>, const G, G>*>(data);
  }
};

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
