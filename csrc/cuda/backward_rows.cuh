// Shared code of the backward kernels: a loop over the rows of h, which is normalized, and of dy, the gradient of
// h * rstd * w. It computes
//   dh = dy * rstd * w - h * c, with c = rstd^3 * mean(dy * w * h)
//   dw = the sum over rows of dy * rstd * h
#pragma once
#include "operator_kernels.cuh"

namespace normops::cuda {

// T is the type of grad_output, R that of all other rows.
template <class T, class R>
struct BackwardArgs : NormArgs<R> {
  RowsOf<const T> grad_output;
  RowsOf<const R> input;
  RowsOf<const R> grad_residual;  // data is null without one
  RowsOf<R> grad_input;           // data is null if not wanted
  SumsOfRows<compute_t<R>, 2> sums;
  compute_t<R>* partials;  // [partials, groups, cols], or null if not wanted

  bool is_plain() const {
    return NormArgs<R>::is_plain() && grad_output.is_plain() && input.is_plain() && grad_residual.is_plain() &&
           grad_input.is_plain() && sums.is_plain();
  }
};

// The numbers of a row that its gradients depend on.
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

// dy and h of a pack, as elements or as numbers.
template <class Gradients, class Values>
struct Terms {
  Gradients dy;
  Values h;
};

// The prologue, passed as Prologue, of an operator without one: dy is grad_output, h is input, and grad_input is dh.
// Other prologues have the same functions, which compute dy and h from grad_output and input, and grad_input from dh.
struct IdentityPrologue {
  // Returns true if a residual is supported, and sums as inputs or outputs.
  static constexpr bool is_identity() { return true; }
  struct Nothing {};
  struct Prepared {
    __device__ Nothing operator[](int) const { return {}; }
  };

  // A thread's gates for kPacks packs of a row. prepare() converts these, and the packs of grad_output, once for both
  // passes.
  template <int kPacks>
  struct Held {
    template <class... Place>
    __device__ void load(const IdentityPrologue&, const Place&...) {}
    template <class Columns, class Gradients>
    __device__ Prepared prepare(const IdentityPrologue&, const Columns&, const Gradients&) const {
      return {};
    }
  };

  __device__ Nothing row(int64_t) const { return {}; }
  __device__ Nothing row_of_gradient(int64_t) const { return {}; }

  // The same for packs that are processed together; p is the first of them.
  template <class Columns, class Gradients>
  __device__ Prepared prepare(Nothing, const Columns&, int64_t, const Gradients&) const {
    return {};
  }

  template <class Gradients, class Values>
  __device__ Terms<Gradients, Values> terms(const Gradients& grad_output, const Values& input, Nothing) const {
    return {grad_output, input};
  }

  // Converts dh to grad_input.
  template <class... Computed>
  __device__ void finish(const Computed&...) const {}
};

// squares += h^2, dots += dy * w * h, where dy * w is rounded to T if `casts`.
template <class T, class R, class TermsOfPack>
__device__ void add_terms(const TermsOfPack& terms, const Numbers<R>& scale, bool casts,
                          compute_t<R> (&squares)[kChains<R>], compute_t<R> (&dots)[kChains<R>]) {
  add_squares<R>(terms.h, squares);
  const Numbers<R> x = to_compute<R>(terms.h);
  Numbers<R> g = to_compute<R>(terms.dy);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) g.element[i] *= scale.element[i];
  round_if<T>(g, casts);
#pragma unroll
  for (int i = 0; i < kPack<R>; i++) {
    compute_t<R>& chain = dots[i % kChains<R>];
    chain = fma_rn(g.element[i], x.element[i], chain);
  }
}

// Computes dh + residual for a pack, and adds dy * rstd * h to dw. If `casts`, dy * w and h * rstd are rounded to T,
// and so is the product of dy and the latter.
template <class T, class R, class TermsOfPack, class AddToWeight>
__device__ Numbers<R> gradients(const TermsOfPack& terms, const Numbers<R>& scale, const Numbers<R>& residual,
                                const RowFactors<compute_t<R>>& row, bool casts, AddToWeight add) {
  const Numbers<R> dy = to_compute<R>(terms.dy), x = to_compute<R>(terms.h);
  Numbers<R> dx;
  if (sizeof(T) == 2 && casts) {
    compiler_barrier();  // see round_if()
    Numbers<R> g, n;
#pragma unroll
    for (int i = 0; i < kPack<R>; i++) {
      g.element[i] = dy.element[i] * scale.element[i];
      n.element[i] = x.element[i] * row.rstd;
    }
    round_if<T>(g, true);
    round_if<T>(n, true);
#pragma unroll
    for (int i = 0; i < kPack<R>; i++) {
      dx.element[i] = fma_rn(g.element[i], row.rstd, fma_rn(-row.c, x.element[i], residual.element[i]));
      n.element[i] *= dy.element[i];
    }
    round_if<T>(n, true);
#pragma unroll
    for (int i = 0; i < kPack<R>; i++) add(i, n.element[i], 1);
  } else {
#pragma unroll
    for (int i = 0; i < kPack<R>; i++) {
      const compute_t<R> scaled_dy = dy.element[i] * row.rstd;
      add(i, scaled_dy, x.element[i]);
      dx.element[i] = fma_rn(scaled_dy, scale.element[i], fma_rn(-row.c, x.element[i], residual.element[i]));
    }
  }
  return dx;
}

template <class R, class Rows, class Index>
__device__ Numbers<R> load_residual(const Rows& rows, const R* row, Index column, Index count) {
  if (rows.data == nullptr) return {};
  return to_compute<R>(load<kPack<R>>(rows, row, column, count));
}

// The sums of grad_weight over the rows that a block takes, for the columns of a thread's packs. They are in registers,
// or, if there are too many, in shared memory.
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
      // The stride is not blockDim.x, as a compile-time constant costs no register.
      return dynamic_shared<Compute>()[(pack * kPack<T> + i) * max_threads(kPacks) + threadIdx.x];
    } else {
      return registers_[pack][i];
    }
  }

  // Writes the partial sum of the block, whole packs if these are `aligned`. If several rows share the block, their
  // sums are added in the order of the rows.
  template <class Columns>
  __device__ void write(const Columns& columns, Compute* partial, bool aligned) {
    if (blockDim.y == 1) {
      constexpr int kUnrolled = kInShared ? 1 : kPacks;  // registers cannot be indexed at run time
#pragma unroll kUnrolled
      for (int p = 0; p < kPacks; p++) write_pack(columns, partial, p, aligned);
      return;
    }
    Compute* const shared = dynamic_shared<Compute>();  // [blockDim.y, width]
    const int width = blockDim.x * kPacks * kPack<T>;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) {
        if (columns.owns(p, i)) shared[threadIdx.y * width + columns.column(p) + i] = at(p, i);
      }
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
  template <class Columns>
  __device__ void write_pack(const Columns& columns, Compute* partial, int p, bool aligned) {
    constexpr int kAtOnce = 16 / sizeof(Compute);
    if constexpr (kPack<T> == 2 * kAtOnce && Columns::kTogether == 1) {
      // Two neighbouring threads each write one half of both packs, so that the 32 bytes of one instruction are
      // contiguous: memory is written in sectors of that size.
      const int odd = threadIdx.x % 2, first = columns.column(p) - odd * kAtOnce, second = first + kPack<T>;
      Elements<Compute, kAtOnce> halves[2];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const Compute low = at(p, i), high = at(p, i + kAtOnce);
        const Compute other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
        halves[0].words[i] = odd ? other : low;
        halves[1].words[i] = odd ? high : other;
      }
      store_elements(partial + first, halves[0], columns.cols - first, aligned);
      store_elements(partial + second, halves[1], columns.cols - second, aligned);
    } else {
      Elements<Compute, kPack<T>> sums;
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) sums.words[i] = at(p, i);
      store_elements(partial + columns.column(p), sums, columns.count(p), aligned);
    }
  }

  Compute registers_[kInShared ? 1 : kPacks][kPack<T>];
};

// Returns the size of the shared memory of WeightSums.
template <class R, int kPacks>
int64_t weight_sum_bytes(const LaunchShape& shape) {
  if (!sums_in_shared(kPacks) && shape.block.y == 1) return 0;
  return static_cast<int64_t>(shape.block.x * shape.block.y * kPacks * sizeof(Numbers<R>));
}

// Processes rows that fit into registers: each element is read once. A block takes rows until none is left, then writes
// its partial sum of grad_weight. The sums over a row are those of h^2 and of dy * w * h.
template <int kPacks, class Access, class T, class R, class Columns, class Prologue>
__device__ void backward_rows(const BackwardArgs<T, R>& args, const Columns& columns, const Prologue& prologue) {
  using Compute = compute_t<R>;
  const Sums kind = Prologue::is_identity() ? args.sums.template kind<Access>() : Sums::compute;
  const auto& grad_output = view<Access>(args.grad_output);
  const auto& input = view<Access>(args.input);
  const auto& grad_residual = view<Access>(args.grad_residual);
  const auto& grad_input = view<Access>(args.grad_input);
  const int64_t groups = group_count<Access>(args);
  pdl_wait(args.pdl);
  __shared__ RowSumShared<Compute, 2> shared;
  RowSums<Compute, 2, kPacks> sum_row(shared, kind != Sums::input);
  Columns written = columns;
  if (grad_input.data == nullptr) written.take_none();

  const BlockRows block(groups, blockDim.y);
  const GroupScale<R, Access> scale_of_group(args.scale, block.group, args.cols);
  const auto load_scale_of = [&](int p) {
    const int column = columns.column(p), count = columns.count(p);
    return scale_of_group.numbers(scale_of_group.hold(column, count), column, count);
  };
  // All rows have the same scale. It is kept in registers if they suffice, and otherwise reloaded from the L1 cache.
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
    typename Prologue::template Held<kPacks> held;
    Compute sums[2];
  };
  const auto load_row = [&](int64_t row) {
    Loaded loaded;
    load_packs<R>(loaded.x, input, input.row(row), row < args.rows, columns);
    load_packs<R>(loaded.dy, grad_output, grad_output.row(row), row < args.rows, columns);
    loaded.held.load(prologue, row, row < args.rows, columns);
    if (kind == Sums::input && row < args.rows) args.sums.read(loaded.sums, row);
    return loaded;
  };
  // A narrow row alone does not saturate memory bandwidth, so the next row is loaded while this one is processed.
  constexpr bool kLoadsAhead = kPacks <= 2;
  const int64_t row_in_block = threadIdx.y * groups;
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
    auto& [x, dy, held, sums] = loaded;

    const auto prepared = held.prepare(prologue, columns, dy);
    if (kind != Sums::input) {
      Compute squares[kChains<R>] = {}, dots[kChains<R>] = {};
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
        add_terms<T, R>(prologue.terms(dy[p], x[p], prepared[p]), scale_of(p), args.rounding.normalized, squares, dots);
        keep_few_registers<kPacks>();
      }
      sums[0] = fold(squares), sums[1] = fold(dots);
      sum_row(sums);
    }
    if (row >= args.rows) continue;
    if constexpr (Prologue::is_identity()) {
      if (kind == Sums::output) {
        args.sums.write(columns, sums, row);
        continue;
      }
    }

    R* const target = columns.of_row(grad_input.row(row));
    const auto factors = factors_of(sums[0], sums[1], args.inverse_cols, args.eps);
    keep_packed(x);
    keep_packed(dy);
    const auto prologue_target = prologue.row_of_gradient(row);
    const auto write = [&]<bool kHasResidual>() {
      const R* residual = nullptr;
      if constexpr (kHasResidual) residual = columns.of_row(grad_residual.row(row));
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
        const int offset = columns.offset(p), count = columns.count(p);
        Numbers<R> dz = {};
        if constexpr (kHasResidual) dz = load_residual(grad_residual, residual, offset, count);
        const auto terms = prologue.terms(dy[p], x[p], prepared[p]);
        const Numbers<R> w = scale_of(p);
        const auto add = [&](int i, Compute a, Compute b) { dw.at(p, i) = fma_rn(a, b, dw.at(p, i)); };
        Numbers<R> dx = gradients<T, R>(terms, w, dz, factors, args.rounding.normalized, add);
        prologue.finish(dx, terms, w, factors, prologue_target, columns.column(p), count);
        store(grad_input, target, offset, written.count(p), from_compute<R>(dx));
        keep_few_registers<kPacks>();
      }
    };
    // Branches once for each row, unless that would duplicate too much code.
    if (Prologue::is_identity() && (kPacks == 16 || grad_residual.data != nullptr)) {
      write.template operator()<true>();
    } else {
      write.template operator()<false>();
    }
  }
  if (args.partials != nullptr) dw.write(columns, args.partials + blockIdx.x * args.cols, input.aligned);
}

// Processes rows of any width, which are read twice. The block accumulates its sum of grad_weight in global memory.
template <class T, class R, class Columns, class Prologue>
__device__ void backward_rows_of_any_width(const BackwardArgs<T, R>& args, const Columns& columns,
                                           const Prologue& prologue) {
  using Compute = compute_t<R>;
  const Sums kind = Prologue::is_identity() ? args.sums.what : Sums::compute;
  constexpr int kTogether = Columns::kTogether;
  pdl_wait(args.pdl);
  __shared__ RowSumShared<double, 2> shared;
  RowSums<double, 2, kAnyWidth.packs> sum_row(shared);
  Compute* const partial = args.partials != nullptr ? args.partials + blockIdx.x * args.cols : nullptr;
  const BlockRows block(args.groups, 1);
  const GroupScale<R, General> scale(args.scale, block.group, args.cols);

  for (int64_t row = block.first; row < args.rows; row += gridDim.x) {
    const R* const x_row = args.input.row(row);
    const T* const dy_row = args.grad_output.row(row);
    const R* const residual_row = args.grad_residual.row(row);
    const auto prologue_row = prologue.row(row);
    // Loads all packs that are processed together, then calls use(terms, pack) for each.
    const auto with_terms = [&](int64_t p, auto use) {
      Pack<R> x[kTogether];
      Elements<T, kPack<R>> dy[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; t++) {
        const int64_t column = columns.column(p + t), count = columns.count(p + t);
        dy[t] = load<kPack<R>>(args.grad_output, dy_row, column, count);
        x[t] = load<kPack<R>>(args.input, x_row, column, count);
      }
      const auto prepared = prologue.prepare(prologue_row, columns, p, dy);
#pragma unroll
      for (int t = 0; t < kTogether; t++) use(prologue.terms(dy[t], x[t], prepared[t]), p + t);
    };
    Compute sums[2];
    if (kind == Sums::input) {
      args.sums.read(sums, row);
    } else {
      double spans[2] = {};
      for (int64_t first = 0; columns.reaches(first); first += kPacksOfChain) {
        Compute squares[kChains<R>] = {}, dots[kChains<R>] = {};
        for (int i = 0; i < kPacksOfChain; i += kTogether) {
          with_terms(first + i, [&](const auto& terms, int64_t p) {
            const Numbers<R> w = scale.numbers({}, columns.column(p), columns.count(p));
            add_terms<T, R>(terms, w, args.rounding.normalized, squares, dots);
          });
        }
        spans[0] += fold(squares);
        spans[1] += fold(dots);
      }
      sum_row(spans);
      sums[0] = static_cast<Compute>(spans[0]), sums[1] = static_cast<Compute>(spans[1]);
    }

    if constexpr (Prologue::is_identity()) {
      if (kind == Sums::output) {
        args.sums.write(columns, sums, row);
        continue;
      }
    }

    const auto factors = factors_of(sums[0], sums[1], args.inverse_cols, args.eps);
    const auto prologue_target = prologue.row_of_gradient(row);
    const auto write = [&](const auto& terms, int64_t p) {
      const int64_t column = columns.column(p), count = columns.count(p);
      const Numbers<R> w = scale.numbers({}, column, count);
      const auto add = [&](int i, Compute a, Compute b) {
        if (partial == nullptr || i >= count) return;
        const Compute sum = row == block.first ? 0 : partial[column + i];
        partial[column + i] = fma_rn(a, b, sum);
      };
      Numbers<R> dx = gradients<T, R>(terms, w, load_residual(args.grad_residual, residual_row, column, count), factors,
                                      args.rounding.normalized, add);
      prologue.finish(dx, terms, w, factors, prologue_target, column, count);
      if (args.grad_input.data != nullptr) {
        store(args.grad_input, args.grad_input.row(row), column, count, from_compute<R>(dx));
      }
    };
    for (int64_t p = 0; columns.reaches(p); p += kTogether) with_terms(p, write);
  }
}

// Returns the number of clusters that share the rows, if `at_once` run at once. Each has rows of one group.
inline unsigned clusters_of_rows(int64_t at_once, int64_t rows, int64_t groups, const LaunchShape& shape) {
  const int64_t most = blocks_of_rows(rows, shape.block.y, groups) / groups;
  return static_cast<unsigned>(std::clamp<int64_t>(at_once / groups, 1, most) * groups);
}

// Each cluster (or block, if a row has one) computes a partial sum of one group. As many clusters are launched as run
// at once, but at least one for each group: so the sums are few, and no cluster waits for others to end. The number
// does not depend on the access, which must not change the sum.
template <class Kernels, class T, class R, int kPacks>
LaunchShape backward_shape(const RowConfig& config, const KernelArgs& args, const Device& device) {
  LaunchShape shape = {dim3(1, config.cluster), block_of(config)};
  if constexpr (kPacks > 0) shape.shared_bytes = weight_sum_bytes<R, kPacks>(shape);
  static PerKeyCache<std::tuple<int, int, int>, int64_t> found;  // by device, threads and blocks of a cluster
  int64_t at_once = found({current_device_index(), config.threads, config.cluster}, [&] {
    int64_t least = INT64_MAX;
    for (const auto kernel : kernels_for<Kernels, T, R, kPacks>()) {
      least = std::min(least, clusters_at_once(kernel, shape, device.multiprocessors));
    }
    return least;
  });
  constexpr int64_t kBytes = sizeof(compute_t<R>);
  if (kPacks == 0) at_once = std::min(at_once, kPartialsBytes / (args.cols * kBytes));
  shape.grid.x = clusters_of_rows(at_once, args.rows, args.weight.groups, shape);
  shape.pdl = device.pdl;
  return shape;
}

template <class Kernels>
void launch_backward(const KernelArgs& args, const Device& device, Stream stream, const AllocatePartials& allocate) {
  dispatch_kernels<Kernels>(args, device, [&]<class T, class R, int kPacks>(const RowConfig& config) {
    const LaunchShape shape = backward_shape<Kernels, T, R, kPacks>(config, args, device);
    const int64_t or_of_starts = Kernels::or_of_starts(args);
    BackwardArgs<T, R> backward = {norm_args_of<R>(args, or_of_starts, device.pdl),
                                   rows_of<const T, R>(args[kGradOutput], or_of_starts),
                                   rows_of<const R, R>(args[kInput], or_of_starts),
                                   rows_of<const R, R>(args[kGradResidual], or_of_starts),
                                   rows_of<R, R>(args[kGradInput], or_of_starts),
                                   SumsOfRows<compute_t<R>, 2>(args),
                                   nullptr};
    if (args.has(kGradWeight)) {
      backward.partials = static_cast<compute_t<R>*>(allocate(shape.grid.x / args.weight.groups));
    }
    launch_kernel<Kernels, T, R, kPacks>(shape, stream, backward, Kernels::template extra_args<T, R>(args));
  });
}

}  // namespace normops::cuda
