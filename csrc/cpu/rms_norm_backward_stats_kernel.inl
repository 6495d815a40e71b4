// The kernels of rms_norm_backward_stats and rms_norm_backward_from_stats, compiled once per instruction set by
// foreach_isa.h.
#include "given_rows.inl"

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Rows with the sums over them, which are given or wanted.
template <class Rows, class Number, Sums sums>
class RowsWithSums : public Rows {
 public:
  using Args = typename Rows::Args;
  static constexpr Sums kSums = sums;

  struct Row : Rows::Row {
    Number *square_sum, *dot;
  };

  RowsWithSums(const Args& args, int64_t row)
      : Rows(args, row),
        square_sums_(static_cast<Number*>(args.square_sum), args.square_sum_rows, args.weight.groups, row),
        dots_(static_cast<Number*>(args.dot), args.dot_rows, args.weight.groups, row) {}

  void next_rows(int count, int64_t group) {
    Rows::next_rows(count, group);
    square_sums_.next_rows(count, group), dots_.next_rows(count, group);
  }
  void next_group() {
    Rows::next_group();
    square_sums_.next_group(), dots_.next_group();
  }
  Row next(int r, int position) { return {Rows::next(r, position), square_sums_.next(r), dots_.next(r)}; }

 private:
  GroupedRows<Number> square_sums_, dots_;
};

template <class T, class R>
using SummedTo = RowsWithSums<GivenRows<T, R, true, false, RmsNormBackwardStatsArgs>, compute_t<R>, Sums::wanted>;

template <class T, class R, bool kGradInput, bool kResidual>
using Summed =
    RowsWithSums<GivenRows<T, R, kGradInput, kResidual, RmsNormBackwardFromStatsArgs>, const compute_t<R>, Sums::given>;

void stats(const CpuArgs<RmsNormBackwardStatsArgs>& args, int64_t begin, int64_t end) {
  dispatch_pair(args.grad_output_dtype, args.dtype,
                [&]<class T, class R>() { backward_parts<SummedTo<T, R>>(args, begin, end); });
}

void from_stats(const CpuArgs<RmsNormBackwardFromStatsArgs>& args, int64_t begin, int64_t end) {
  dispatch_given<Summed>(args, [&]<class Source>() { backward_parts<Source>(args, begin, end); });
}

}  // namespace

extern const RmsNormBackwardStatsKernels kRmsNormBackwardStatsKernels;
const RmsNormBackwardStatsKernels kRmsNormBackwardStatsKernels = {{stats, nullptr, nullptr},
                                                                  {from_stats, nullptr, nullptr}};

}  // namespace normops::cpu::NORMOPS_ISA
