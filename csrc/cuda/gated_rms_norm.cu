// gated_rms_norm, where a is the activated gate: y = x * rstd * w * a, or, gated first, y = h * rstd * w with h = x * a
#include "forward_rows.cuh"
#include "gate.cuh"

namespace normops::cuda {
namespace {

template <class T, class Access>
struct Gated {
  typename Access::template AnyRows<const T> gate;
  Activation activation;

  bool is_plain() const { return gate.is_plain(); }
  template <class Other>
  Gated<T, Other> as() const {
    return {typename Other::template AnyRows<const T>(gate), activation};
  }
};

// Rows that fit into registers: each element is read once.
template <class T, int kPacks, bool kNormFirst, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_min_blocks(kPacks))
    gated_rms_norm_kernel(const Forward<T, T, Access> args, const Gated<T, Access> gated) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const Columns<T, int> columns(args.cols);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  pdl_wait(args.starts_early);
  Pack<T> x[kRows][kPacks];
  HeldGate<T, kPacks, Access> gate[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], args.input, args.input.row(rows.first, rows.further(r)), rows.has(r), columns);
    gate[r].load(gated.gate, gated.gate.row(rows.first, rows.further(r)), rows.has(r), columns);
  }
  const auto scale = args.scale.of_group(block.group, args.cols);
  const auto activated = [&](int r, int p) {
    return activate<T>(gate[r].numbers(gated.gate, columns, p), gated.activation).value;
  };
  if constexpr (kNormFirst) {
    normalize_rows(args, scale, rows, columns, x, sum_row, [&](Numbers<T>(&y)[1], int r, int p) {
      if (p == 0) gate[r].keep();
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
    normalize_rows(args, scale, rows, columns, h, sum_row);
  }
}

// Rows of any width: read twice.
template <class T, bool kNormFirst>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    gated_rms_norm_any_width_kernel(const Forward<T, T, General> args, const Gated<T, General> gated) {
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const Columns<T, int64_t> columns(args.cols);
  const T* const x = args.input.row(row);
  const char* const gate = gated.gate.row(row);
  const auto load_x = [&](int64_t column, int64_t count) { return load<kPack<T>>(args.input, x, column, count); };
  const auto activated = [&](int64_t column, int64_t count) {
    return activate<T>(load_numbers(gated.gate, gate, column, count), gated.activation).value;
  };
  if constexpr (kNormFirst) {
    normalize_any_width(args, columns, load_x, load_x, [&](Numbers<T>(&y)[1], int64_t p) {
      multiply<T>(y[0], activated(columns.column(p), columns.count(p)));
    });
  } else {
    const auto load_h = [&](int64_t column, int64_t count) {
      Numbers<T> h = to_compute<T>(load_x(column, count));
      multiply<T>(h, activated(column, count));
      return h;
    };
    normalize_any_width(args, columns, load_h, load_h);
  }
}

template <bool kNormFirst>
struct GatedRmsNormKernels : GatedKernels {
  template <class T, class>
  static Gated<T, General> own(const KernelArgs& args) {
    return {any_rows_of<const T>(args[kGate], args.cols), args.gating.activation};
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
