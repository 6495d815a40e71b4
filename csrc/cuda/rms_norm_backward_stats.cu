// rms_norm_backward_stats: the sums over each row that rms_norm_backward needs. rms_norm_backward_from_stats: the
// gradients, where these sums are given.
#include "backward_rows.cuh"
#include "rms_norm_stats_launch.h"

namespace normops::cuda {
namespace {

// The sums over rows of h^2 and of dy * w * h. Number is const where they are given.
template <class Number, class Access>
struct RowStats : NoGate {
  static constexpr Sums kSums = std::is_const_v<Number> ? Sums::given : Sums::wanted;
  using Pair = std::remove_const_t<Number>[2];

  typename Access::template Rows<Number> square_sum, dot;

  template <class Other>
  RowStats<Number, Other> as() const {
    using Rows = typename Other::template Rows<Number>;
    return {{}, Rows(square_sum), Rows(dot)};
  }

  template <int kPacks>
  struct Held : NoGate::Held<kPacks> {
    Pair sums = {};

    template <class Columns>
    __device__ void load(const RowStats& stats, int64_t row, bool is_row, const Columns&) {
      if constexpr (kSums == Sums::given) {
        if (is_row) stats.read(row, sums);
      }
    }
  };

  __device__ void read(int64_t row, Pair& sums) const { sums[0] = *square_sum.row(row), sums[1] = *dot.row(row); }
  __device__ void write(int64_t row, const Pair& sums) const {
    *square_sum.row(row) = sums[0], *dot.row(row) = sums[1];
  }
};

template <class Number, class Args>
RowStats<Number, General> stats_of(const Args& args) {
  return {{}, numbers_of<Number>(args.square_sum, args.square_sum_rows), numbers_of<Number>(args.dot, args.dot_rows)};
}

template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), backward_min_blocks(kPacks))
    rms_norm_backward_stats_kernel(const Backward<T, R, Access> args, const RowStats<compute_t<R>, Access> stats) {
  backward_rows<kPacks>(args, Columns<R, int>(args.cols), stats);
}

template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_backward_stats_any_width_kernel(const Backward<T, R, General> args,
                                             const RowStats<compute_t<R>, General> stats) {
  backward_rows_of_any_width(args, Columns<R, int64_t>(args.cols), stats);
}

template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), backward_min_blocks(kPacks))
    rms_norm_backward_from_stats_kernel(const Backward<T, R, Access> args,
                                        const RowStats<const compute_t<R>, Access> stats) {
  backward_rows<kPacks>(args, Columns<R, int>(args.cols), stats);
}

template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_backward_from_stats_any_width_kernel(const Backward<T, R, General> args,
                                                  const RowStats<const compute_t<R>, General> stats) {
  backward_rows_of_any_width(args, Columns<R, int64_t>(args.cols), stats);
}

// Calls launch.template operator()<T, R>(config) with that of rms_norm_backward.
template <class Launch>
void dispatch_config(const RmsNormBackwardArgs& args, const Device& device, Launch launch) {
  dispatch_pair(args.grad_output_dtype, args.dtype, [&]<class T, class R>() {
    launch.template operator()<T, R>(backward_config(packs_of<R>(args.cols), kPack<R>, sizeof(compute_t<R>), device));
  });
}

}  // namespace

void launch_rms_norm_backward_stats(const RmsNormBackwardStatsArgs& args, const Device& device, Stream stream) {
  const int64_t groups = args.weight.groups;
  dispatch_config(args, device, [&]<class T, class R>(const RowConfig& config) {
    const auto backward = backward_of<T, R>(args);
    const auto stats = stats_of<compute_t<R>>(args);
    // As many clusters as run at once, so that what rows have in common is loaded once.
    const auto launch_all = [&](auto kernel, const auto&... arguments) {
      LaunchShape shape = {dim3(1, config.cluster), block_of(config)};
      shape.grid.x =
          clusters_of_rows(clusters_at_once(kernel, shape, device.multiprocessors), args.rows, groups, shape);
      launch(kernel, shape, stream, arguments...);
    };
    dispatch_packs(config.packs, [&]<int kPacks>() {
      if constexpr (kPacks == 0) {
        launch_all(rms_norm_backward_stats_any_width_kernel<T, R>, backward, stats);
      } else {
        const auto launch_with = [&]<class Access>() {
          launch_all(rms_norm_backward_stats_kernel<T, R, kPacks, Access>, backward.template as<Access>(),
                     stats.template as<Access>());
        };
        dispatch_plain<kPacks, R>(backward.scale.is_plain_of_one_group(), launch_with, backward.grad_output,
                                  backward.input, stats.square_sum, stats.dot);
      }
    });
  });
}

void launch_rms_norm_backward_from_stats(const RmsNormBackwardFromStatsArgs& args, const Device& device,
                                         Stream stream) {
  const int64_t groups = args.weight.groups;
  const int64_t partials =
      rms_norm_backward_partials(args.dtype, args.grad_output_dtype, args.rows, args.cols, groups, device);
  dispatch_config(args, device, [&]<class T, class R>(const RowConfig& summed) {
    auto backward = backward_of<T, R>(args);
    backward.inverse_cols = 1.0 / static_cast<double>(args.size);
    const auto stats = stats_of<const compute_t<R>>(args);
    const RowConfig& config = from_stats_config(summed);
    LaunchShape shape = {dim3(static_cast<unsigned>(partials * groups), config.cluster), block_of(config)};
    dispatch_packs(config.packs, [&]<int kPacks>() {
      if constexpr (kPacks == 0) {
        launch(rms_norm_backward_from_stats_any_width_kernel<T, R>, shape, stream, backward, stats);
      } else if constexpr (kPacks <= kMostPacksFromStats) {
        shape.shared_bytes = weight_sum_bytes<R, kPacks>(shape);
        const auto launch_with = [&]<class Access>() {
          launch(rms_norm_backward_from_stats_kernel<T, R, kPacks, Access>, shape, stream,
                 backward.template as<Access>(), stats.template as<Access>());
        };
        dispatch_plain<kPacks, R>(backward.scale.is_plain_of_one_group(), launch_with, backward.grad_output,
                                  backward.input, backward.grad_residual, backward.grad_input, stats.square_sum,
                                  stats.dot);
      }
    });
  });
}

}  // namespace normops::cuda
