// The interface by which operators define their kernels, and the launch of these.
#pragma once
#include <array>

#include "row.cuh"

namespace normops::cuda {

// Arguments of the kernels of all operators. R is the type of the normalized rows.
template <class R>
struct NormArgs {
  int64_t rows;
  int64_t cols;
  double inverse_cols;
  double eps;
  int64_t groups;
  ScaleOf<R> scale;
  Rounding rounding;  // to the type of the output, or of grad_output
  bool pdl;

  bool is_plain() const { return scale.is_plain(); }
};

template <class Access, class R>
__device__ int64_t group_count(const NormArgs<R>& args) {
  return std::is_same_v<Access, Plain> ? 1 : args.groups;
}

// All packs begin at multiples of a pack if `or_of_starts` is one.
template <class R>
NormArgs<R> norm_args_of(const KernelArgs& args, int64_t or_of_starts, bool pdl) {
  return {args.rows,
          args.cols,
          1.0 / static_cast<double>(args.size),
          args.eps,
          args.weight.groups,
          scale_of<R>(args.weight, or_of_starts),
          args.rounding,
          pdl};
}

// Defaults for the kernels of an operator. Each operator defines, for a type T of the output or of grad_output, and a
// type R of the normalized rows,
//   held<T, R, kPacks, Access>()  the kernel for rows that are held in kPacks packs of each thread
//   any_width<T, R>()             the kernel for all other rows
//   extra_args<T, R>(args)               a tuple of what both take after NormArgs, input and output, or after
//   BackwardArgs
struct OperatorKernels {
  // Calls visit.template operator()<T, R>().
  template <class Visit>
  static void dispatch_types(const KernelArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() { visit.template operator()<T, T>(); });
  }
  // Returns a multiple of a pack if all packs begin at multiples of a pack.
  static int64_t or_of_starts(const KernelArgs& args) { return args.cols; }
  template <class R>
  static RowConfig config(const KernelArgs& args, const Device& device) {
    return row_config(packs_of<R>(args.cols), device);
  }
  static constexpr bool holds(int /*packs*/) { return true; }
  // The access of the plain kernel for one group.
  using OneGroup = Plain;
};

// Calls visit.template operator()<T, R, kPacks>(config); kPacks is 0 for rows of any width.
template <class Kernels, class Visit>
void dispatch_kernels(const KernelArgs& args, const Device& device, Visit visit) {
  Kernels::dispatch_types(args, [&]<class T, class R>() {
    const RowConfig config = Kernels::template config<R>(args, device);
    dispatch_packs<R>(config.packs, [&]<int kPacks>() {
      if constexpr (kPacks == 0 || Kernels::holds(kPacks)) visit.template operator()<T, R, kPacks>(config);
    });
  });
}

// Returns the kernels for a number of packs: the one for any width, or those with General and Plain access and, for
// narrow rows such as heads, PlainOfGroups.
template <class Kernels, class T, class R, int kPacks>
auto kernels_for() {
  if constexpr (kPacks == 0) {
    return std::array{Kernels::template any_width<T, R>()};
  } else {
    const auto general = Kernels::template held<T, R, kPacks, General>();
    const auto plain = Kernels::template held<T, R, kPacks, typename Kernels::OneGroup>();
    if constexpr (kPacks <= 4) {
      return std::array{general, plain, Kernels::template held<T, R, kPacks, PlainOfGroups>()};
    } else {
      return std::array{general, plain};
    }
  }
}

// Launches the kernel that supports `args` and the elements of `others`, with these arguments.
template <class Kernels, class T, class R, int kPacks, class Args, class... Others>
void launch_kernel(const LaunchShape& shape, Stream stream, const Args& args, const std::tuple<Others...>& others) {
  const auto kernels = kernels_for<Kernels, T, R, kPacks>();
  const size_t plain = args.groups == 1 ? 1 : 2;
  std::apply(
      [&](const Others&... other) {
        const bool is_plain = plain < kernels.size() && args.is_plain() && (cuda::is_plain(other) && ...);
        launch(kernels[is_plain ? plain : 0], shape, stream, args, other...);
      },
      others);
}

}  // namespace normops::cuda
