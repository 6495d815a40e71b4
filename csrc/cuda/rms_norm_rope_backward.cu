// rms_norm_rope_backward: rotates grad_output back, then computes rms_norm_backward.
#include "backward_rows.cuh"
#include "rope.cuh"

namespace normops::cuda {
namespace {

// The prologue, passed as Prologue: dy is grad_output, rotated back.
template <class T, class Access>
struct RotatedBack : IdentityPrologue {
  static constexpr bool is_identity() { return false; }

  const RotationOf<T>& rotation;
  bool casts;

  template <int kPacks>
  struct Gradients {
    Numbers<T> of_pack[kPacks];
    __device__ const Numbers<T>& operator[](int p) const { return of_pack[p]; }
  };

  template <int kPacks>
  struct Held {
    const char* angles;
    bool has_row;

    template <class Columns>
    __device__ void load(const RotatedBack& back, int64_t row, bool is_row, const Columns&) {
      angles = back.row(row);
      has_row = is_row;
    }
    template <class Columns>
    __device__ Gradients<kPacks> prepare(const RotatedBack& back, const Columns& columns,
                                         const Pack<T> (&grad_output)[kPacks]) const {
      return back.rotated(angles, has_row, columns, 0, grad_output);
    }
  };

  __device__ const char* row(int64_t index) const { return rotation.row(index); }

  __device__ Gradients<2> prepare(const char* row, const RotatedColumns<T, int64_t>& columns, int64_t p,
                                  const Pack<T> (&grad_output)[2]) const {
    return rotated(row, true, columns, p, grad_output);
  }

  __device__ Terms<Numbers<T>, Pack<T>> terms(const Pack<T>&, const Pack<T>& input, const Numbers<T>& dy) const {
    return {dy, input};
  }

 private:
  template <class Columns, class Index, int kPacks>
  __device__ Gradients<kPacks> rotated(const char* row, bool is_row, const Columns& columns, Index first,
                                       const Pack<T> (&grad_output)[kPacks]) const {
    Gradients<kPacks> gradients;
#pragma unroll
    for (int p = 0; p < kPacks; p += 2) {
      Numbers<T> slot[2] = {to_compute<T>(grad_output[p]), to_compute<T>(grad_output[p + 1])};
      rotation.template rotate<Access, true>(slot, row, is_row, columns, first + p);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        round_if<T>(slot[t], casts);  // no effect on columns that are not rotated
        gradients.of_pack[p + t] = slot[t];
      }
      keep_few_registers<kPacks>();
    }
    return gradients;
  }
};

// For pairs of columns i and j, with h = input, grad_input and grad_weight are dh and dw of backward_rows.cuh:
//   dy[i] = grad_output[i] * cos[i] + grad_output[j] * sin[j]
//   dy[j] = grad_output[j] * cos[j] - grad_output[i] * sin[i]
// For rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_backward_min_blocks(kPacks))
    rms_norm_rope_backward_kernel(const BackwardArgs<T, T> args, const RotationOf<T> rotation) {
  backward_rows<kPacks, Access>(args, HeldRotatedColumns<T, kPacks>(args.cols, rotation),
                                RotatedBack<T, Access>{{}, rotation, args.rounding.multiplied});
}

// The same for rows of any width.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    rms_norm_rope_backward_any_width_kernel(const BackwardArgs<T, T> args, const RotationOf<T> rotation) {
  backward_rows_of_any_width(args, RotatedColumns<T, int64_t>(args.cols, rotation),
                             RotatedBack<T, General>{{}, rotation, args.rounding.multiplied});
}

struct RmsNormRopeBackwardKernels : RopeKernels {
  template <class T, class, int kPacks, class Access>
  static auto held() {
    return rms_norm_rope_backward_kernel<T, kPacks, Access>;
  }
  template <class T, class>
  static auto any_width() {
    return rms_norm_rope_backward_any_width_kernel<T>;
  }
};

}  // namespace

void launch_rms_norm_rope_backward(const KernelArgs& args, const Device& device, Stream stream,
                                   const AllocatePartials& allocate) {
  launch_backward<RmsNormRopeBackwardKernels>(args, device, stream, allocate);
}

}  // namespace normops::cuda
