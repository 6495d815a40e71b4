// The kernels of rms_norm_backward_stats and rms_norm_backward_from_stats are those of rms_norm_backward, with sums.
#include "rms_norm_stats_kernel.h"

namespace normops::cpu {
namespace {

template <class Args>
void backward(const CpuArgs<Args>& args, const RowSums& sums, int64_t begin, int64_t end) {
  rms_norm_backward_kernels().backward.rows({args, args.stream, args.rows_per_chunk, args.scale, args.held, &sums},
                                            begin, end);
}

void stats(const CpuArgs<RmsNormBackwardStatsArgs>& args, int64_t begin, int64_t end) {
  backward(args, {false, args.cols, args.square_sum, args.square_sum_rows, args.dot, args.dot_rows}, begin, end);
}

void from_stats(const CpuArgs<RmsNormBackwardFromStatsArgs>& args, int64_t begin, int64_t end) {
  // Given sums are only read.
  void *const square_sum = const_cast<void*>(args.square_sum), *const dot = const_cast<void*>(args.dot);
  backward(args, {true, args.size, square_sum, args.square_sum_rows, dot, args.dot_rows}, begin, end);
}

}  // namespace

const RmsNormBackwardStatsKernels& rms_norm_backward_stats_kernels() {
  static constexpr RmsNormBackwardStatsKernels kernels = {{stats, nullptr, nullptr}, {from_stats, nullptr, nullptr}};
  return kernels;
}

}  // namespace normops::cpu
