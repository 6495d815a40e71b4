// rms_norm_backward: dx = dy * rstd * w - x * c + residual with c = rstd^3 * mean(dy * w * x), and dw = sum over rows
// of dy * rstd * x
#include "rms_norm_row.cuh"

namespace normops::cuda {
namespace {

// T is the type of grad_output, R that of everything else with rows.
template <class T, class R, class Access>
struct Backward {
  template <class W>
  using Rows = typename Access::template Rows<W>;

  int64_t rows;
  int64_t cols;
  double inverse_cols;
  double eps;
  typename Access::Groups groups;
  typename Access::template Scale<R> scale;
  Rows<const T> grad_output;
  Rows<const R> input;
  Rows<const R> grad_residual;  // data is null without one
  Rows<R> grad_input;           // data is null if not wanted
  compute_t<R>* partials;       // [partials, groups, cols], or null if not wanted

  template <class Other>
  Backward<T, R, Other> as() const {
    using To = Backward<T, R, Other>;
    return {rows,
            cols,
            inverse_cols,
            eps,
            typename Other::Groups(groups),
            typename Other::template Scale<R>(scale),
            typename To::template Rows<const T>(grad_output),
            typename To::template Rows<const R>(input),
            typename To::template Rows<const R>(grad_residual),
            typename To::template Rows<R>(grad_input),
            partials};
  }
};

// What of a row goes into its gradients.
template <class Compute>
struct RowFactors {
  Compute rstd;
  Compute c;
};

template <class Compute>
__device__ RowFactors<Compute> factors_of(Compute square_sum, Compute dot, double inverse_cols, double eps) {
  const Compute rstd = rstd_of(square_sum, inverse_cols, eps);
  return {rstd, static_cast<Compute>(dot * inverse_cols) * rstd * rstd * rstd};
}

// squares += x^2, dots += dy * w * x
template <class R, class T>
__device__ void add_terms(const Elements<T, kPack<R>>& dy_pack, const Pack<R>& x_pack, const Numbers<R>& scale,
                          compute_t<R> (&squares)[kChains<R>], compute_t<R> (&dots)[kChains<R>]) {
  add_squares<R>(x_pack, squares);
  const Numbers<R> dy = to_compute<R>(dy_pack), x = to_compute<R>(x_pack);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) {
    compute_t<R>& chain = dots[i % kChains<R>];
    chain = fma_rn(dy.element[i] * scale.element[i], x.element[i], chain);
  }
}

// grad_input of a pack, without the residual; adds dy * rstd * x to dw.
template <class R, class T, class AddToWeight>
__device__ Numbers<R> gradients(const Elements<T, kPack<R>>& dy_pack, const Pack<R>& x_pack, const Numbers<R>& scale,
                                const Numbers<R>& residual, const RowFactors<compute_t<R>>& row, AddToWeight add) {
  const Numbers<R> dy = to_compute<R>(dy_pack), x = to_compute<R>(x_pack);
  Numbers<R> dx;
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) {
    const compute_t<R> scaled_dy = dy.element[i] * row.rstd;
    add(i, scaled_dy, x.element[i]);
    dx.element[i] = fma_rn(scaled_dy, scale.element[i], fma_rn(-row.c, x.element[i], residual.element[i]));
  }
  return dx;
}

template <class R, class Rows, class Index>
__device__ Numbers<R> load_residual(const Rows& rows, const R* row, Index column, Index count) {
  if (rows.data == nullptr) return {};
  return to_compute<R>(load<kPack<R>>(rows, row, column, count));
}

// The sums of grad_weight over the rows that a block takes, for the columns of a thread's packs: in registers, or in
// shared memory where there are too many.
template <class T, int kPacks>
class WeightSums {
 public:
  using Compute = compute_t<T>;
  static constexpr bool kInShared = sums_in_shared(kPacks);

  __device__ WeightSums() {
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) at(p, i) = 0;
    }
  }

  __device__ Compute& at(int pack, int i) {
    if constexpr (kInShared) {
      // A stride that is known when it is compiled costs no register.
      return dynamic_shared<Compute>()[(pack * kPack<T> + i) * max_threads(kPacks) + threadIdx.x];
    } else {
      return registers_[pack][i];
    }
  }

  // Adds up what the rows that share the block have, in their order.
  __device__ void write(const Columns<T, int>& columns, Compute* partial) {
    if (blockDim.y == 1) {
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
#pragma unroll
        for (int i = 0; i < kPack<T>; i++) {
          if (i < columns.count(p)) partial[columns.column(p) + i] = at(p, i);
        }
      }
      return;
    }
    Compute* const shared = dynamic_shared<Compute>();  // [blockDim.y, width]
    const int width = blockDim.x * kPacks * kPack<T>;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) shared[threadIdx.y * width + columns.column(p) + i] = at(p, i);
    }
    __syncthreads();
    for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < columns.cols;
         column += blockDim.x * blockDim.y) {
      Compute sum = 0;
      for (unsigned y = 0; y < blockDim.y; y++) sum += shared[y * width + column];
      partial[column] = sum;
    }
  }

 private:
  Compute registers_[kInShared ? 1 : kPacks][kPack<T>];
};

// Rows that fit into registers: each element is read once. A block takes rows until none is left, and then writes its
// share of grad_weight.
template <class T, class R, int kPacks, class Access>
__global__ void __launch_bounds__(max_threads(kPacks), backward_min_blocks(kPacks))
    rms_norm_backward_kernel(const Backward<T, R, Access> args) {
  using Compute = compute_t<R>;
  __shared__ RowSumShared<Compute, 2> shared;
  RowSums<Compute, 2, kPacks> sum_row(shared);
  const Columns<R, int> columns(args.cols);
  Columns<R, int> written = columns;
  if (args.grad_input.data == nullptr) written.cols = 0;

  const BlockRows block(args.groups.count, blockDim.y);
  const auto scale_of_group = args.scale.of_group(block.group, args.cols);
  const auto load_scale_of = [&](int p) {
    const int column = columns.column(p), count = columns.count(p);
    return scale_of_group.numbers(scale_of_group.hold(column, count), column, count);
  };
  // All rows have the same; where registers are scarce it comes from the L1 cache again.
  constexpr bool kHoldsScale = kPacks * kPack<R> <= 16;
  Numbers<R> scale[kHoldsScale ? kPacks : 1];
  if constexpr (kHoldsScale) {
#pragma unroll
    for (int p = 0; p < kPacks; p++) scale[p] = load_scale_of(p);
  }
  const auto scale_of = [&](int p) {
    if constexpr (kHoldsScale) {
      return scale[p];
    } else {
      return load_scale_of(p);
    }
  };
  WeightSums<R, kPacks> dw;

  struct Loaded {
    Pack<R> x[kPacks];
    Elements<T, kPack<R>> dy[kPacks];
  };
  const auto load_row = [&](int64_t row) {
    Loaded loaded;
    load_packs<R>(loaded.x, args.input, args.input.row(row), row < args.rows, columns);
    load_packs<R>(loaded.dy, args.grad_output, args.grad_output.row(row), row < args.rows, columns);
    return loaded;
  };
  // A narrow row asks for too little memory at a time, so that it has to be asked for while the one before is dealt
  // with.
  constexpr bool kLoadsAhead = kPacks <= 2;
  const int64_t row_in_block = threadIdx.y * args.groups.count;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  Loaded next;
  if constexpr (kLoadsAhead) next = load_row(block.first + row_in_block);

  for (int64_t base = block.first; base < args.rows; base += step) {
    const int64_t row = base + row_in_block;
    Loaded loaded;
    if constexpr (kLoadsAhead) {
      loaded = next;
      next = load_row(row + step);
    } else {
      loaded = load_row(row);
    }
    auto& [x, dy] = loaded;

    Compute squares[kChains<R>] = {}, dots[kChains<R>] = {};
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      add_terms<R>(dy[p], x[p], scale_of(p), squares, dots);
      keep_few_registers<kPacks>();
    }
    Compute sums[2] = {fold(squares), fold(dots)};
    sum_row(sums);
    if (row >= args.rows) continue;

    R* const target = columns.of_row(args.grad_input.row(row));
    const auto factors = factors_of(sums[0], sums[1], args.inverse_cols, args.eps);
    keep_packed(x);
    keep_packed(dy);
    const auto write = [&]<bool kHasResidual>() {
      const R* residual = nullptr;
      if constexpr (kHasResidual) residual = columns.of_row(args.grad_residual.row(row));
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
        const int offset = columns.offset(p), count = columns.count(p);
        Numbers<R> dz = {};
        if constexpr (kHasResidual) dz = load_residual(args.grad_residual, residual, offset, count);
        const Numbers<R> dx =
            gradients<R>(dy[p], x[p], scale_of(p), dz, factors, [&](int i, Compute scaled_dy, Compute x_element) {
              dw.at(p, i) = fma_rn(scaled_dy, x_element, dw.at(p, i));
            });
        store(args.grad_input, target, offset, written.count(p), from_compute<R>(dx));
        keep_few_registers<kPacks>();
      }
    };
    // Decided once a row, but where that would take twice as much code.
    if (kPacks == 16 || args.grad_residual.data != nullptr) {
      write.template operator()<true>();
    } else {
      write.template operator()<false>();
    }
  }
  if (args.partials != nullptr) dw.write(columns, args.partials + blockIdx.x * args.cols);
}

// Rows of any width: read twice. The block's share of grad_weight is summed where it is written.
template <class T, class R>
__global__ void __launch_bounds__(kAnyWidth.threads)
    rms_norm_backward_any_width_kernel(const Backward<T, R, General> args) {
  using Compute = compute_t<R>;
  __shared__ RowSumShared<double, 2> shared;
  RowSums<double, 2, kAnyWidth.packs> sum_row(shared);
  const Columns<R, int64_t> columns(args.cols);
  Compute* const partial = args.partials != nullptr ? args.partials + blockIdx.x * args.cols : nullptr;
  const BlockRows block(args.groups.count, 1);
  const auto scale = args.scale.of_group(block.group, args.cols);

  for (int64_t row = block.first; row < args.rows; row += gridDim.x) {
    const R* const x_row = args.input.row(row);
    const T* const dy_row = args.grad_output.row(row);
    const R* const residual_row = args.grad_residual.row(row);
    double sums[2] = {};
    for (int64_t first = 0; columns.count(first) > 0; first += kPacksOfChain) {
      Compute squares[kChains<R>] = {}, dots[kChains<R>] = {};
      for (int p = 0; p < kPacksOfChain; p++) {
        const int64_t column = columns.column(first + p), count = columns.count(first + p);
        add_terms<R>(load<kPack<R>>(args.grad_output, dy_row, column, count),
                     load<kPack<R>>(args.input, x_row, column, count), scale.numbers({}, column, count), squares, dots);
      }
      sums[0] += fold(squares);
      sums[1] += fold(dots);
    }
    sum_row(sums);
    const auto factors =
        factors_of(static_cast<Compute>(sums[0]), static_cast<Compute>(sums[1]), args.inverse_cols, args.eps);

    for (int64_t p = 0; columns.count(p) > 0; p++) {
      const int64_t column = columns.column(p), count = columns.count(p);
      const Numbers<R> dx = gradients<R>(
          load<kPack<R>>(args.grad_output, dy_row, column, count), load<kPack<R>>(args.input, x_row, column, count),
          scale.numbers({}, column, count), load_residual(args.grad_residual, residual_row, column, count), factors,
          [&](int i, Compute scaled_dy, Compute x_element) {
            if (partial == nullptr || i >= count) return;
            const Compute sum = row == block.first ? 0 : partial[column + i];
            partial[column + i] = fma_rn(scaled_dy, x_element, sum);
          });
      if (args.grad_input.data != nullptr) {
        store(args.grad_input, args.grad_input.row(row), column, count, from_compute<R>(dx));
      }
    }
  }
}

// grad_weight = sum over the partials, in chains that neighbouring threads of y share: a block sums 32 columns.
template <class Compute, class W>
__global__ void __launch_bounds__(1024)
    grad_weight_kernel(const Compute* partials, int64_t count, int64_t cols, W* grad_weight) {
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
    grad_weight[target] = from_compute<W>(static_cast<compute_t<W>>(column_sum[0]));
  }
}

// Each cluster (or block, where a row has one) makes a partial sum: no more of them than run at once, so that there are
// few, and none waits for others to end; of each group of rows there is one at least. Either access has as many, as it
// must not show in the sum.
template <class T, class R, int kPacks>
LaunchShape shape_of(const RowConfig& config, int64_t rows, int64_t cols, int64_t groups, const Device& device) {
  LaunchShape shape = {dim3(1, config.cluster), block_of(config), 0};
  int64_t at_once;
  if constexpr (kPacks == 0) {
    at_once = std::min(clusters_at_once(rms_norm_backward_any_width_kernel<T, R>, shape, device.multiprocessors),
                       kPartialsBytes / (cols * static_cast<int64_t>(sizeof(compute_t<R>))));
  } else {
    if (sums_in_shared(kPacks) || shape.block.y > 1) {
      shape.shared_bytes = static_cast<int64_t>(shape.block.x * shape.block.y * kPacks * sizeof(Numbers<R>));
    }
    at_once = clusters_at_once(rms_norm_backward_kernel<T, R, kPacks, General>, shape, device.multiprocessors);
    if constexpr (kHasPlain<kPacks, R>) {
      const auto plain = rms_norm_backward_kernel<T, R, kPacks, Plain>;
      at_once = std::min(at_once, clusters_at_once(plain, shape, device.multiprocessors));
    }
    if constexpr (kHasPlainOfGroups<kPacks, R>) {
      const auto plain = rms_norm_backward_kernel<T, R, kPacks, PlainOfGroups>;
      at_once = std::min(at_once, clusters_at_once(plain, shape, device.multiprocessors));
    }
  }
  const int64_t of_group =
      std::clamp<int64_t>(at_once / groups, 1, blocks_of_rows(rows, shape.block.y, groups) / groups);
  shape.grid.x = static_cast<unsigned>(of_group * groups);
  return shape;
}

// Calls launch.template operator()<T, R, kPacks>(shape).
template <class Launch>
void dispatch_backward(DType dtype, DType grad_output_dtype, int64_t rows, int64_t cols, int64_t groups,
                       const Device& device, Launch launch) {
  dispatch_pair(grad_output_dtype, dtype, [&]<class T, class R>() {
    const RowConfig& config = backward_config((cols + kPack<R> - 1) / kPack<R>, kPack<R>, sizeof(compute_t<R>), device);
    dispatch_packs(config.packs, [&]<int kPacks>() {
      launch.template operator()<T, R, kPacks>(shape_of<T, R, kPacks>(config, rows, cols, groups, device));
    });
  });
}

}  // namespace

int64_t rms_norm_backward_partials(DType dtype, DType grad_output_dtype, int64_t rows, int64_t cols, int64_t groups,
                                   const Device& device) {
  int64_t blocks = 0;
  dispatch_backward(dtype, grad_output_dtype, rows, cols, groups, device,
                    [&]<class T, class R, int kPacks>(const LaunchShape& shape) { blocks = shape.grid.x; });
  return blocks / groups;
}

void launch_rms_norm_backward(const RmsNormBackwardArgs& args, const Device& device, Stream stream) {
  const auto launch_shape = [&]<class T, class R, int kPacks>(const LaunchShape& shape) {
    const Backward<T, R, General> backward = {
        args.rows,
        args.cols,
        1.0 / static_cast<double>(args.cols),
        args.eps,
        {args.weight.groups},
        scale_of<R>(args.weight, args.cols),
        rows_of<const T, R>(args.grad_output, args.grad_output_rows, args.cols),
        rows_of<const R, R>(args.input, args.input_rows, args.cols),
        rows_of<const R, R>(args.grad_residual, args.grad_residual_rows, args.cols),
        rows_of<R, R>(args.grad_input, args.grad_input_rows, args.cols),
        static_cast<compute_t<R>*>(args.grad_weight_partials)};
    if constexpr (kPacks == 0) {
      launch(rms_norm_backward_any_width_kernel<T, R>, shape, stream, backward);
    } else {
      const auto launch_with = [&]<class Access>() {
        launch(rms_norm_backward_kernel<T, R, kPacks, Access>, shape, stream, backward.template as<Access>());
      };
      dispatch_access<kPacks>(backward.scale, launch_with, backward.grad_output, backward.input, backward.grad_residual,
                              backward.grad_input);
    }
  };
  dispatch_backward(args.dtype, args.grad_output_dtype, args.rows, args.cols, args.weight.groups, device, launch_shape);
}

void launch_grad_weight(DType dtype, DType weight_dtype, const void* partials, int64_t count, int64_t cols,
                        void* grad_weight, Stream stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>((cols + kWarp - 1) / kWarp)), dim3(kWarp, kWarp), 0};
  dispatch(weight_dtype, [&]<class W>() {
    W* const target = static_cast<W*>(grad_weight);
    if (compute_dtype(dtype) == DType::float64) {
      launch(grad_weight_kernel<double, W>, shape, stream, static_cast<const double*>(partials), count, cols, target);
    } else {
      launch(grad_weight_kernel<float, W>, shape, stream, static_cast<const float*>(partials), count, cols, target);
    }
  });
}

}  // namespace normops::cuda
