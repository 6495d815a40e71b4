// gated_rms_norm_backward
#include "backward_rows.cuh"
#include "gate.cuh"

namespace normops::cuda {
namespace {

// The dy and h of a pack, like Terms, and the factors of the pack's gradients.
template <class T>
struct GatedTerms {
  Numbers<T> dy, h;
  Numbers<T> grad_output;
  Numbers<T> a;
  Numbers<T> slope;
  Numbers<T> sloped_input;  // x * a'
};

template <class T, class Access>
struct Gate {
  static constexpr bool is_identity() { return false; }

  View<Access, AnyRowsOf<const T>> rows;
  View<Access, AnyRowsOf<T>> gradients;  // data is null if not wanted
  Gating gating;
  Rounding rounding;

  template <int kPacks>
  struct Activations {
    Activated<T> of_pack[kPacks];
    __device__ const Activated<T>& operator[](int p) const { return of_pack[p]; }
  };

  template <int kPacks>
  struct Held : HeldGate<T, kPacks, Access> {
    __device__ void load(const Gate& gate, int64_t row, bool is_row, const Columns<T, int>& columns) {
      HeldGate<T, kPacks, Access>::load(gate.rows, gate.rows.row(row), is_row, columns);
    }

    // Computes the activations once, for both passes over a row.
    template <class Gradients>
    __device__ Activations<kPacks> prepare(const Gate& gate, const Columns<T, int>& columns, const Gradients&) const {
      Activations<kPacks> activations;
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
        activations.of_pack[p] = cuda::activate<T>(this->numbers(gate.rows, columns, p), gate.gating.activation);
        keep_few_registers<kPacks>();
      }
      return activations;
    }
  };

  __device__ auto row(int64_t index) const { return rows.row(index); }
  __device__ auto row_of_gradient(int64_t index) const { return gradients.row(index); }

  template <class Gradients>
  __device__ Activations<1> prepare(const char* row, const Columns<T, int64_t>& columns, int64_t p,
                                    const Gradients&) const {
    const Numbers<T> numbers = load_numbers(rows, row, columns.column(p), columns.count(p));
    return {{cuda::activate<T>(numbers, gating.activation)}};
  }

  __device__ GatedTerms<T> terms(const Pack<T>& grad_output, const Pack<T>& input, const Activated<T>& a) const {
    const Numbers<T> dy = to_compute<T>(grad_output), x = to_compute<T>(input);
    GatedTerms<T> terms = {dy, x, dy, a.value, a.slope, x};
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) {
      terms.dy.element[i] *= gating.norm_before_gate ? a.value.element[i] : 1;
      terms.h.element[i] *= gating.norm_before_gate ? 1 : a.value.element[i];
      terms.sloped_input.element[i] *= a.slope.element[i];
    }
    round_if<T>(terms.dy, rounding.multiplied);  // no effect if not norm_before_gate: dy is a number of T
    return terms;
  }

  template <class Row, class Index>
  __device__ void finish(Numbers<T>& dh, const GatedTerms<T>& terms, const Numbers<T>& scale,
                         const RowFactors<compute_t<T>>& factors, Row row, Index column, Index count) const {
    Numbers<T> dg = terms.sloped_input;
    if (sizeof(T) == 2 && gating.norm_before_gate && rounding.any()) {
      compiler_barrier();  // see round_if()
      dg = normalized(terms, scale, factors.rstd);
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) dg.element[i] *= terms.grad_output.element[i] * terms.slope.element[i];
    } else {
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) {
        const compute_t<T> dy = terms.grad_output.element[i] * (factors.rstd * scale.element[i]);
        dg.element[i] *= gating.norm_before_gate ? dy : dh.element[i];
        dh.element[i] *= gating.norm_before_gate ? 1 : terms.a.element[i];
      }
    }
    if (row != nullptr) store_numbers(gradients, row, column, count, dg);
  }

 private:
  // Returns h * rstd * w, rounded as in the forward.
  __device__ Numbers<T> normalized(const GatedTerms<T>& terms, const Numbers<T>& scale, compute_t<T> rstd) const {
    Numbers<T> n;
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) n.element[i] = terms.h.element[i] * rstd;
    round_if<T>(n, rounding.normalized);
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) n.element[i] *= scale.element[i];
    round_if<T>(n, rounding.multiplied);
    return n;
  }
};

// With a = activation(gate), a' its slope, and dh, dw those of backward_rows.cuh:
//   norm_before_gate: h = input, dy = grad_output * a, grad_input = dh, grad_gate = grad_output * h * rstd * w * a'
//   otherwise: h = input * a, dy = grad_output, grad_input = dh * a, grad_gate = dh * input * a'
// For rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_backward_min_blocks(kPacks))
    gated_rms_norm_backward_kernel(const BackwardArgs<T, T> args, const AnyRowsOf<const T> gate,
                                   const AnyRowsOf<T> grad_gate, const Gating gating) {
  backward_rows<kPacks, Access>(args, Columns<T, int>(args.cols),
                                Gate<T, Access>{view<Access>(gate), view<Access>(grad_gate), gating, args.rounding});
}

// The same for rows of any width.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    gated_rms_norm_backward_any_width_kernel(const BackwardArgs<T, T> args, const AnyRowsOf<const T> gate,
                                             const AnyRowsOf<T> grad_gate, const Gating gating) {
  backward_rows_of_any_width(args, Columns<T, int64_t>(args.cols),
                             Gate<T, General>{gate, grad_gate, gating, args.rounding});
}

struct GatedRmsNormBackwardKernels : GatedKernels {
  template <class T, class>
  static auto extra_args(const KernelArgs& args) {
    return std::tuple(any_rows_of<const T>(args[kGate], args.cols), any_rows_of<T>(args[kGradGate], args.cols),
                      args.gating);
  }
  template <class T, class, int kPacks, class Access>
  static auto held() {
    return gated_rms_norm_backward_kernel<T, kPacks, Access>;
  }
  template <class T, class>
  static auto any_width() {
    return gated_rms_norm_backward_any_width_kernel<T>;
  }
};

}  // namespace

void launch_gated_rms_norm_backward(const KernelArgs& args, const Device& device, Stream stream,
                                    const AllocatePartials& allocate) {
  launch_backward<GatedRmsNormBackwardKernels>(args, device, stream, allocate);
}

}  // namespace normops::cuda
