// rms_norm_rope: y = x * rstd * w, rotated
#include "forward_rows.cuh"
#include "rope.cuh"

namespace normops::cuda {
namespace {

// Rows that fit into registers: each element is read once.
template <class T, int kPacks, class Access>
__global__ void __launch_bounds__(gated_threads(kPacks), gated_min_blocks(kPacks))
    rms_norm_rope_kernel(const Forward<T, T, Access> args, const typename Access::template Rows<const T> input,
                         const RotationOf<T> rotation) {
  constexpr int kRows = rows_in_flight(kPacks);
  __shared__ RowSumShared<compute_t<T>, kRows> shared;
  RowSums<compute_t<T>, kRows, kPacks> sum_row(shared);
  const HeldRotatedColumns<T, kPacks> columns(args.cols, rotation);
  const BlockRows block(args.groups.count, kRows * blockDim.y);
  const TakenRows rows(block, args.rows, args.groups.count);
  wait_for_previous_kernel();
  Pack<T> x[kRows][kPacks];
  const char* angles[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    load_packs<T>(x[r], input, input.row(rows.first, rows.further(r)), rows.has(r), columns);
    angles[r] = rotation.row(rows.first, rows.further(r));
  }
  normalize_rows(args, args.scale.of_group(block.group, args.cols), rows, columns, x, sum_row,
                 [&](Numbers<T>(&y)[2], int r, int p) {
                   rotation.template rotate<Access>(y, angles[r], rows.has(r), columns, p);
                 });
}

// Rows of any width: read twice.
template <class T>
__global__ void __launch_bounds__(kAnyWidth.threads, 1)
    rms_norm_rope_any_width_kernel(const Forward<T, T, General> args, const RowsOf<const T> input,
                                   const RotationOf<T> rotation) {
  const int64_t row = BlockRows(args.groups.count, 1).first;
  const RotatedColumns<T, int64_t> columns(args.cols, rotation);
  const T* const x = input.row(row);
  const char* const angles = rotation.row(row);
  const auto load_pack = [&](int64_t column, int64_t count) { return load<kPack<T>>(input, x, column, count); };
  normalize_any_width(args, columns, load_pack, load_pack, [&](Numbers<T>(&y)[2], int64_t p) {
    rotation.template rotate<General>(y, angles, true, columns, p);
  });
}

}  // namespace

void launch_rms_norm_rope(const KernelArgs& args, const Device& device, Stream stream) {
  dispatch(args.dtype(), [&]<class T>() {
    const int64_t begins = begins_of(args.rotation, args.cols);
    const auto forward = forward_of<T, T>(args, begins);
    const auto input = rows_of<const T, T>(args[kInput], begins);
    const auto rotation = rotation_of<T>(args);
    const RowConfig config = rope_config_of<T>(args.rotation, args.cols, device);
    dispatch_forward<T>(args.rows, args.weight.groups, config, device, [&]<int kPacks>(const LaunchShape& shape) {
      if constexpr (kPacks == 0) {
        launch(rms_norm_rope_any_width_kernel<T>, shape, stream, forward, input, rotation);
      } else if constexpr (is_rope_packs(kPacks)) {
        const auto launch_with = [&]<class Chosen>() {
          using Access = RopeAccess<Chosen>;
          launch(rms_norm_rope_kernel<T, kPacks, Access>, shape, stream, forward.template as<Access>(),
                 typename Access::template Rows<const T>(input), rotation);
        };
        dispatch_access<kPacks>(forward.scale, launch_with, forward.output, input, rotation);
      }
    });
  });
}

}  // namespace normops::cuda
