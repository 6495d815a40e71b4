// Access to a group's scale, the alignment of rows, and the columns that are processed together.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Returns whether every row begins with a cache line.
inline bool begins_with_lines(const RowsArg& rows) {
  bool result = reinterpret_cast<uintptr_t>(rows.data) % 64 == 0;
  for (int d = 0; d < rows.layout.dims; d++) result &= rows.layout.strides[d] % 64 == 0;
  return result;
}

// Returns the index of a tensor in an operator's list; -1 if it is not listed.
template <class RowOp>
constexpr int place_of(TensorIndex tensor) {
  for (int i = 0; i < static_cast<int>(std::size(RowOp::kTensors)); i++) {
    if (RowOp::kTensors[i] == tensor) return i;
  }
  return -1;
}

// The segments of a row: the columns before the paired ones, the paired ones, and the columns after them.
constexpr int kBefore = 0, kPaired = 1, kAfter = 2, kSegments = 3;

// Maps blocks that are processed together to their columns and packed positions. A SingleBlock is processed alone.
struct SingleBlock {
  static constexpr int kCount = 1;
  int64_t packed_offset = 0;
  int segment = kBefore;

  NORMOPS_INLINE int64_t column(int64_t column, int) const { return column; }
  NORMOPS_INLINE int64_t packed(int64_t column, int) const { return column + packed_offset; }
};

// Two blocks: the second columns of pairs are `pairs` columns after the first ones.
struct SplitPair {
  static constexpr int kCount = 2;
  int64_t pairs, packed_offset, packed_pairs;
  int segment = kPaired;

  NORMOPS_INLINE int64_t column(int64_t column, int p) const { return column + p * pairs; }
  NORMOPS_INLINE int64_t packed(int64_t column, int p) const { return column + packed_offset + p * packed_pairs; }
};

// A block of pairs of adjacent columns.
struct InterleavedBlock : SingleBlock {};

// Selects how columns are processed: separately, or those of paired_columns() in pairs.
enum class Pairing { none, rotate_half, interleaved };

template <class RowOp>
constexpr Pairing pairing_of() {
  if constexpr (requires { RowOp::kPairing; }) return RowOp::kPairing;
  return Pairing::none;
}

// Returns whether cases branch at run time, for less code: if blocks are compute-bound, or types are rare. T is the
// type of the output or grad_output.
template <class RowOp, class T>
constexpr bool branches_at_run_time() {
  return RowOp::kComputeBound || !kHasFastPath<typename RowOp::Element> || !kHasFastPath<T>;
}

template <class RowOp>
ScaleLayout scale_layout(const CpuArgs& args) {
  return {kDType<typename RowOp::Element>, args.cols, paired_columns(args.rotation)};
}

// Returns the number of packed columns in a group's scale, and in its sum over rows.
template <class RowOp>
int64_t packed_cols(const CpuArgs& args) {
  return scale_layout<RowOp>(args).packed_cols();
}

// Calls visit(parts, begin, end) for the segments of columns [begin, end). With pairs, these must be all columns of the
// row, and the paired segment comes first. A SplitPair counts only the first columns of pairs.
template <class R, Pairing pairing, class Visit>
NORMOPS_INLINE void each_segment([[maybe_unused]] const RotaryColumns& paired, int64_t begin, int64_t end,
                                 Visit visit) {
  if constexpr (pairing == Pairing::none) {
    visit(SingleBlock(), begin, end);
  } else {
    constexpr DType dtype = kDType<R>;
    const int64_t first = paired.offset, pairs = paired.pairs, behind = first + 2 * pairs;
    const int64_t packed = padded_cols(dtype, first) - first;  // distance of a packed column from its column
    int64_t packed_behind;
    if constexpr (pairing == Pairing::rotate_half) {
      const int64_t packed_pairs = padded_cols(dtype, pairs);
      visit(SplitPair{pairs, packed, packed_pairs}, first, first + pairs);
      packed_behind = packed + 2 * (packed_pairs - pairs);
    } else {
      visit(InterleavedBlock{{packed, kPaired}}, first, behind);
      packed_behind = packed + padded_cols(dtype, 2 * pairs) - 2 * pairs;
    }
    if (first == 0 && behind >= end) [[likely]]
      return;
    const auto visit_one = [&](int segment) NORMOPS_INLINE_LAMBDA {
      const bool is_after = segment == kAfter;
      visit(SingleBlock{is_after ? packed_behind : 0, segment}, is_after ? behind : begin, is_after ? end : first);
    };
    if constexpr (kEvenOdd<R>) {
      if (first > 0) visit_one(kBefore);
      if (behind < end) visit_one(kAfter);
    } else {
      // One instance for both unpaired segments, which are short. For bfloat16 it takes 1.1 of the time of two.
      for (int segment = first > 0 ? kBefore : kAfter; segment <= (behind < end ? kAfter : kBefore);
           segment += kAfter) {
        visit_one(segment);
      }
    }
  }
}

// A row of a gate, its gradient, a full-size weight or a bias, for rows of T. Its type may differ from T and is
// dispatched at run time, as kernels for each pair of types would be too many.
template <class T, class Byte>
struct AnyRow {
  Byte* data;  // null if not given or not requested
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
