// rms_norm_rope: rotates the normalized rows.
#include "forward_rows.cuh"
#include "rope.cuh"

namespace normops::cuda {
namespace {

// For pairs of columns i and j:
//   y = input * rsqrt(mean(input^2) + eps) * (weight + weight_offset)
//   output[i] = y[i] * cos[i] - y[j] * sin[i], output[j] = y[j] * cos[j] + y[i] * sin[j]
// For rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_min_blocks(kPacks))
    rms_norm_rope_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                         const RotationOf<T> rotation) {
  const auto& input_rows = view<Access>(input);
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const HeldRotatedColumns<T, kPacks> columns(args.cols, rotation);
  const TakenRows rows(args.rows, group_count<Access>(args), kRows);
  pdl_wait(args.pdl);
  Pack<T> x[kRows][kPacks];
  const char* angles[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input_rows, input_rows.row(rows.first, rows.row_offset(r)), rows.has(r), columns);
    angles[r] = rotation.row(rows.first, rows.row_offset(r));
  }
  normalize_rows<Access>(args, output, rows, columns, x, sum_row, [&](Numbers<T>(&y)[2], int r, int p) {
    rotation.template rotate<Access>(y, angles[r], rows.has(r), columns, p);
  });
}

// The same for rows of any width, which are read twice.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    rms_norm_rope_any_width_kernel(const NormArgs<T> args, const RowsOf<const T> input, const RowsOf<T> output,
                                   const RotationOf<T> rotation) {
  const int64_t row = BlockRows(args.groups, 1).first;
  const RotatedColumns<T, int64_t> columns(args.cols, rotation);
  const T* const x = input.row(row);
  const char* const angles = rotation.row(row);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); };
  normalize_any_width(args, output, columns, load_pack, load_pack, [&](Numbers<T>(&y)[2], int64_t p) {
    rotation.template rotate<General>(y, angles, true, columns, p);
  });
}

struct RmsNormRopeKernels : RopeKernels {
  template <class T, class, int kPacks, class Access>
  static auto held() {
    return rms_norm_rope_kernel<T, kPacks, Access>;
  }
  template <class T, class>
  static auto any_width() {
    return rms_norm_rope_any_width_kernel<T>;
  }
};

}  // namespace

void launch_rms_norm_rope(const KernelArgs& args, const Device& device, Stream stream) {
  launch_forward<RmsNormRopeKernels>(args, device, stream);
}

}  // namespace normops::cuda
