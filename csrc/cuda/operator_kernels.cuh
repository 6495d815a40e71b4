// How an operator says what its kernels are, and how these are launched.
#pragma once
#include "row.cuh"

namespace normops::cuda {

// What operators have that say nothing else. They all have, for a type T of the output or of grad_output, and a type R
// of what is normalized,
//   held<T, R, kPacks, Access>()  the kernel for rows that are held in kPacks packs of each thread
//   any_width<T, R>()             that for all others
//   own<T, R>(args)               what both take beside what all kernels of the forward, or of the backward, take
struct OperatorKernels {
  // Calls visit.template operator()<T, R>().
  template <class Visit>
  static void dispatch_types(const KernelArgs& args, Visit visit) {
    dispatch(args.dtype(), [&]<class T>() { visit.template operator()<T, T>(); });
  }
  // Where packs begin, at multiples of a pack if this is one.
  static int64_t begins(const KernelArgs& args) { return args.cols; }
  template <class R>
  static RowConfig config(const KernelArgs& args, const Device& device) {
    return row_config(packs_of<R>(args.cols), device);
  }
  static constexpr bool holds(int /*packs*/) { return true; }
  // Which access serves where this one would do.
  template <class Access>
  using Served = Access;
};

// Calls visit.template operator()<T, R, kPacks>(config); 0 packs are any width.
template <class Kernels, class Visit>
void dispatch_kernels(const KernelArgs& args, const Device& device, Visit visit) {
  Kernels::dispatch_types(args, [&]<class T, class R>() {
    const RowConfig config = Kernels::template config<R>(args, device);
    dispatch_packs<R>(config.packs, [&]<int kPacks>() {
      if constexpr (kPacks == 0 || Kernels::holds(kPacks)) visit.template operator()<T, R, kPacks>(config);
    });
  });
}

// Launches the one that serves these arguments: what all kernels take, and the operator's own.
template <class Kernels, class T, class R, int kPacks, class Args, class Own>
void launch_kernel(const LaunchShape& shape, Stream stream, const Args& args, const Own& own) {
  if constexpr (kPacks == 0) {
    launch(Kernels::template any_width<T, R>(), shape, stream, args, own);
  } else {
    const auto launch_with = [&]<class Chosen>() {
      using Access = typename Kernels::template Served<Chosen>;
      launch(Kernels::template held<T, R, kPacks, Access>(), shape, stream, args.template as<Access>(),
             own.template as<Access>());
    };
    dispatch_access<kPacks>(args.is_plain() && own.is_plain(), args.groups.count, launch_with);
  }
}

}  // namespace normops::cuda
