// The kernels of rms_norm_stats and rms_norm_from_stats, compiled once per instruction set by foreach_isa.h.
#include "forward_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// The rows of the input, the sums of whose squares are given.
template <class T>
class SummedRows {
 public:
  using Element = T;
  using Args = CpuArgs<RmsNormFromStatsArgs>;
  static constexpr bool kCostly = false, kFetchesOutput = false, kGivesSums = true;
  static constexpr Ahead kAhead = Ahead::when_streaming;

  struct Rows {
    EvenRows<const T> x;
    EvenRows<const compute_t<T>> square_sum;
    int64_t size;

    template <class Visit>
    void each(Visit visit) {
      visit(x), visit(square_sum);
    }
    typename InputRows<T>::Row row(int) const { return {x.row}; }
    compute_t<T> rstd(double eps) const { return rstd_of<T>(admitted_number<T>(*square_sum.row), size, eps); }
    NORMOPS_INLINE void prefetch(int64_t column) const { NORMOPS_ISA::prefetch(x.row + x.stride + column); }
  };

  SummedRows(const Args& args, int64_t row)
      : inputs_(static_cast<const T*>(args.input), args.input_rows, row),
        square_sums_(static_cast<const compute_t<T>*>(args.square_sum), args.square_sum_rows, row),
        size_(args.size) {}

  template <class Visit>
  void each(Visit visit) {
    visit(inputs_), visit(square_sums_);
  }
  Rows next_even(int64_t count) { return {inputs_.next_even(count), square_sums_.next_even(count), size_}; }

 private:
  RowIterator<const T> inputs_;
  RowIterator<const compute_t<T>> square_sums_;
  int64_t size_;
};

void stats(const CpuArgs<RmsNormStatsArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { sum_rows<InputRows<T, RmsNormStatsArgs>>(args, begin, end); });
}

void from_stats(const CpuArgs<RmsNormFromStatsArgs>& args, int64_t begin, int64_t end) {
  dispatch(args.dtype, [&]<class T>() { forward_rows<T, SummedRows<T>>(args, begin, end); });
}

}  // namespace

extern const RmsNormStatsKernels kRmsNormStatsKernels;
const RmsNormStatsKernels kRmsNormStatsKernels = {{stats, nullptr, nullptr}, {from_stats, nullptr, nullptr}};

}  // namespace normops::cpu::NORMOPS_ISA
