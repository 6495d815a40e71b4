// The rows of all tensors of an operator, and the iteration of a forward over them.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Index of scratch instead of a tensor: it keeps a row's values from the first pass, see holds_in_output().
constexpr auto kRowScratch = static_cast<TensorIndex>(kTensorCount);

template <class RowOp>
constexpr int kRowsOf = 2 + static_cast<int>(std::size(RowOp::kTensors));

// Returns the index of a tensor in a table of rows, whose first entries are the output and the scale.
template <class RowOp>
constexpr int row_of(TensorIndex tensor) {
  return tensor == kOutput ? 0 : tensor == kWeight ? 1 : 2 + place_of<RowOp>(tensor);
}

// The current rows of an operator's tensors, with the scale as the weight. Each row is stored next to its stride: with
// separate arrays, GCC 12 adds strides to rows in vector registers. Pass by reference: a copy goes through the stack,
// and loading pointers right after it is slow (up to 2.7 of the time).
template <class RowOp>
struct CurrentRows {
  StridedRows of[kRowsOf<RowOp>];

  template <TensorIndex tensor, class T>
  NORMOPS_INLINE T* row() const {
    constexpr int kRow = row_of<RowOp>(tensor);
    return of[kRow].template at<T>();
  }
  template <class Visit>
  NORMOPS_INLINE void each(Visit visit) {
    [&]<int... i>(std::integer_sequence<int, i...>)
        NORMOPS_INLINE_LAMBDA { (visit(of[i]), ...); }(std::make_integer_sequence<int, kRowsOf<RowOp>>());
  }
};

// The rows after the current ones.
template <class RowOp>
struct NextRows {
  const CurrentRows<RowOp>& current;

  template <TensorIndex tensor, class T>
  NORMOPS_INLINE T* row() const {
    constexpr int kRow = row_of<RowOp>(tensor);
    StridedRows rows = current.of[kRow];
    rows.next();
    return rows.template at<T>();
  }
};

// The rows of an operator's tensors, from a given one on.
template <class RowOp>
class RowTable {
 public:
  RowTable(const CpuArgs& args, int64_t row) : RowTable(args, row, Places()) {}
  RowTable(const RowTable&) = delete;

  template <class Visit>
  void each(Visit visit) {
    for (const RowIterator& rows : rows_) visit(rows);
  }
  CurrentRows<RowOp> take_strided(int64_t count) {
    CurrentRows<RowOp> current;
    for (int i = 0; i < kRowsOf<RowOp>; i++) current.of[i] = rows_[i].take_strided(count);
    return current;
  }

 private:
  using Places = std::make_integer_sequence<int, kRowsOf<RowOp>>;

  template <int... i>
  RowTable(const CpuArgs& args, int64_t row, std::integer_sequence<int, i...>)
      : scale_(scale_rows(args)),
        row_scratch_(scratch_rows(args)),
        rows_{RowIterator(i == 0   ? args[kOutput]
                          : i == 1 ? scale_
                                   : rows_of(args, RowOp::kTensors[i < 2 ? 0 : i - 2]),
                          row)...} {}

  // The scale's rows have the weight's layout, or are those of the groups, repeated.
  static RowsArg scale_rows(const CpuArgs& args) {
    RowsArg rows = kNoRows;
    rows.data = const_cast<void*>(args.scale);
    const int64_t groups = args.weight.groups, row_bytes = args.cols * size_of(args.weight.dtype);
    const auto bytes = packed_cols<RowOp>(args) * static_cast<int64_t>(sizeof(compute_t<typename RowOp::Element>));
    if (groups == 1) return rows;
    rows.layout = args.rows_of_weight;
    if (rows.layout.dims == 0) rows.layout = {2, {INT64_MAX / groups, groups}, {0, row_bytes}};
    for (int64_t& stride : rows.layout.strides) stride = stride / row_bytes * bytes;
    return rows;
  }
  static RowsArg scratch_rows(const CpuArgs& args) {
    if (place_of<RowOp>(kRowScratch) >= 0 && holds_in_output(args)) return args[kOutput];
    RowsArg rows = kNoRows;
    rows.data = args.row_scratch;
    return rows;
  }
  const RowsArg& rows_of(const CpuArgs& args, TensorIndex tensor) {
    return tensor == kRowScratch ? row_scratch_ : args[tensor];
  }

  const RowsArg scale_, row_scratch_;
  RowIterator rows_[kRowsOf<RowOp>];
};

// Returns the longest run of the next `rows` in which all tensors have fixed strides. `each` calls a function with the
// iterator of each tensor.
template <class Each>
NORMOPS_INLINE StrideRuns common_runs(int64_t rows, Each each) {
  StrideRuns result = {INT64_MAX, INT64_MAX, rows};
  const auto lower = [](int64_t& number, int64_t bound)
                         NORMOPS_INLINE_LAMBDA { number = bound < number ? bound : number; };
  each([&](const auto& tensor) NORMOPS_INLINE_LAMBDA {
    lower(result.size, tensor.run());
    lower(result.left, tensor.run_left());
  });
  each([&](const auto& tensor) NORMOPS_INLINE_LAMBDA {
    const bool fits = tensor.run() == INT64_MAX || (tensor.run() == result.size && tensor.run_left() == result.left);
    lower(result.count, fits ? tensor.strided_left() : result.left);
  });
  return result;
}

// Calls visit(r) for `count` rows, and advances `rows` after each. Counts neither single rows nor rows of each tensor:
// that takes registers (up to a third more time for narrow rows).
template <class Rows, class Visit>
NORMOPS_INLINE void for_each_row(StrideRuns& runs, int64_t count, Rows& rows, Visit visit) {
  for (int r = 0; count > 0;) {
    int64_t together = runs.left < count ? runs.left : count;
    runs.left -= together;
    count -= together;
#pragma GCC unroll 1
    for (; together > 0; together--, r++) {
      visit(r);
      rows.each([](StridedRows& tensor) NORMOPS_INLINE_LAMBDA { tensor.next(); });
    }
    if (runs.left > 0) continue;
    runs.left = runs.size;
    rows.each([](StridedRows& tensor) NORMOPS_INLINE_LAMBDA { tensor.next_run(); });
  }
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
