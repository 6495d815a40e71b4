// rms_norm_backward. The sums over each row may be inputs or the only outputs: kernels with general access check.
#include "backward_rows.cuh"

namespace normops::cuda {
namespace {

// g = grad_output * (weight + weight_offset), rstd = rsqrt(mean(input^2) + eps)
// grad_input = g * rstd - input * rstd^3 * mean(g * input) + grad_residual
// grad_weight = sum over rows of grad_output * input * rstd
template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), backward_min_blocks(kPacks))
    rms_norm_backward_kernel(const BackwardArgs<T, R> args) {
  backward_rows<kPacks, Access>(args, Columns<R, int>(args.cols), IdentityPrologue());
}

// The same for rows of any width.
template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads) rms_norm_backward_any_width_kernel(const BackwardArgs<T, R> args) {
  backward_rows_of_any_width(args, Columns<R, int64_t>(args.cols), IdentityPrologue());
}

// grad_weight[column] = sum over i of partials[i, column]. A block sums 32 columns, each in 32 chains, one for each of
// its threads along y.
template <class Compute, class W>
__global__ void __launch_bounds__(1024)
    grad_weight_kernel(const Compute* partials, int64_t count, int64_t cols, W* grad_weight, bool pdl) {
  pdl_wait(pdl);
  __shared__ Compute sums[kWarp][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  Compute sum = 0;
  if (column < cols) {
    for (int64_t i = threadIdx.y; i < count; i += kWarp) sum += partials[i * cols + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Transposed, so that a warp folds one column.
  Compute column_sum[1] = {sums[threadIdx.x][threadIdx.y]};
  sum_lanes(column_sum, kWarp);
  const int64_t target = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && target < cols) {
    grad_weight[target] = from_number<W>(column_sum[0]);
  }
}

struct RmsNormBackwardKernels : OperatorKernels {
  template <class Visit>
  static void dispatch_types(const KernelArgs& args, Visit visit) {
    dispatch_pair(args[kGradOutput].dtype, args.dtype(), visit);
  }
  template <class R>
  static RowConfig config(const KernelArgs& args, const Device& device) {
    return backward_config(packs_of<R>(args.cols), kPack<R>, sizeof(compute_t<R>), device);
  }
  template <class, class>
  static std::tuple<> extra_args(const KernelArgs&) {
    return {};
  }
  template <class T, class R, int kPacks, class Access>
  static auto held() {
    return rms_norm_backward_kernel<T, R, kPacks, Access>;
  }
  template <class T, class R>
  static auto any_width() {
    return rms_norm_backward_any_width_kernel<T, R>;
  }
};

}  // namespace

void launch_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                              const AllocatePartials& allocate) {
  launch_backward<RmsNormBackwardKernels>(args, device, stream, allocate);
}

void launch_grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, const Device& device, Stream stream) {
  const auto blocks = static_cast<unsigned>((cols + kWarp - 1) / kWarp);
  const LaunchShape shape = {dim3(blocks), dim3(kWarp, kWarp), 0, device.pdl};
  dispatch(weight_dtype, [&]<class W>() {
    W* const target = static_cast<W*>(grad_weight);
    if (compute_dtype(dtype) == DType::float64) {
      launch(grad_weight_kernel<double, W>, shape, stream, static_cast<const double*>(partials), count, cols, target,
             shape.pdl);
    } else {
      launch(grad_weight_kernel<float, W>, shape, stream, static_cast<const float*>(partials), count, cols, target,
             shape.pdl);
    }
  });
}

}  // namespace normops::cuda
