// gated_rms_norm: multiplies by the activated gate after or before it normalizes.
#include "forward_rows.cuh"
#include "gate.cuh"

namespace normops::cuda {
namespace {

// kNormFirst: output = input * rsqrt(mean(input^2) + eps) * (weight + weight_offset) * activation(gate)
// otherwise: h = input * activation(gate), output = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)
// For rows that fit into registers: each element is read once.
template <class T, int kPacks, bool kNormFirst, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_min_blocks(kPacks))
    gated_rms_norm_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                          const AnyRowsOf<const T> gate, const Activation activation) {
  const auto& input_rows = view<Access>(input);
  const auto& gate_rows = view<Access>(gate);
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const Columns<T, int> columns(args.cols);
  const TakenRows rows(args.rows, group_count<Access>(args), kRows);
  pdl_wait(args.pdl);
  Pack<T> x[kRows][kPacks];
  HeldGate<T, kPacks, Access> held[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input_rows, input_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
    held[r].load(gate_rows, gate_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
  }
  const auto activated = [&](int r, int p) {
    return activate<T>(held[r].numbers(gate_rows, columns, p), activation).value;
  };
  if constexpr (kNormFirst) {
    normalize_rows<Access>(args, output, rows, columns, x, sum_row, [&](Numbers<T>(&y)[1], int r, int p) {
      if (p == 0) held[r].keep();
      multiply<T>(y[0], activated(r, p));
    });
  } else {
    Numbers<T> h[kRows][kPacks];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
      for (int p = 0; p < kPacks; p++) {
        h[r][p] = to_compute<T>(x[r][p]);
        multiply<T>(h[r][p], activated(r, p));
        keep_few_registers<kPacks>();
      }
    }
    normalize_rows<Access>(args, output, rows, columns, h, sum_row);
  }
}

// The same for rows of any width, which are read twice.
template <class T, bool kNormFirst>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    gated_rms_norm_any_width_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                                    const AnyRowsOf<const T> gate, const Activation activation) {
  const int64_t row = BlockRows(args.groups, 1).first;
  const Columns<T, int64_t> columns(args.cols);
  const T* const x = input.row(row);
  const char* const gate_row = gate.row(row);
  const auto load_x = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); };
  const auto activated = [&](int64_t column, int64_t count) {
    return activate<T>(load_numbers(gate, gate_row, column, count), activation).value;
  };
  if constexpr (kNormFirst) {
    normalize_any_width(args, output, columns, load_x, load_x, [&](Numbers<T>(&y)[1], int64_t p) {
      multiply<T>(y[0], activated(columns.column(p), columns.count(p)));
    });
  } else {
    const auto load_h = [&](int64_t column, int64_t count) {
      Numbers<T> h = to_compute<T>(load_x(column, count));
      multiply<T>(h, activated(column, count));
      return h;
    };
    normalize_any_width(args, output, columns, load_h, load_h);
  }
}

template <bool kNormFirst>
struct GatedRmsNormKernels : GatedKernels {
  template <class T, class>
  static auto extra_args(const KernelArgs& args) {
    return std::tuple(any_rows_of<const T>(args[kGate], args.cols), args.gating.activation);
  }
  template <class T, class, int kPacks, class Access>
  static auto held() {
    return gated_rms_norm_kernel<T, kPacks, kNormFirst, Access>;
  }
  template <class T, class>
  static auto any_width() {
    return gated_rms_norm_any_width_kernel<T, kNormFirst>;
  }
};

}  // namespace

void launch_gated_rms_norm(const KernelArgs& args, const Device& device, Stream stream) {
  (args.gating.norm_before_gate ? launch_forward<GatedRmsNormKernels<true>>
                                : launch_forward<GatedRmsNormKernels<false>>)(args, device, stream);
}

}  // namespace normops::cuda
