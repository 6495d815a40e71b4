// Pseudo-random problems for the programs that run the CPU kernels without torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "add_rms_norm_kernel.h"
#include "gated_rms_norm_kernel.h"
#include "rms_norm_rope_kernel.h"
#include "rms_norm_stats_kernel.h"

namespace normops::cpu {

constexpr DType kDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

inline uint64_t random_bits() {  // xorshift64
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

inline std::vector<char> random_numbers(DType dtype, int64_t count) {
  std::vector<char> bytes(count * size_of(dtype));
  dispatch(dtype, [&]<class T>() {
    for (int64_t i = 0; i < count; i++) {
      const float number = static_cast<float>(static_cast<int64_t>(random_bits() >> 40) - (1 << 23)) / (1 << 21);
      T value;
      if constexpr (std::is_same_v<T, bfloat16>) {
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        value.bits = bits >> 16;
      } else if constexpr (std::is_same_v<T, float16>) {
        value.bits = (random_bits() & 0x8fff) | 0x3000;  // magnitudes from 1/8 to 2
      } else {
        value = number;
      }
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

// FNV-1a
inline uint64_t hash(const std::vector<char>& bytes) {
  uint64_t value = 14695981039346656037u;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value;
}

// Row-major problems with all of their inputs and outputs, and the kernels' arguments for them. The residual, which is
// also the backward's input, and the gate may be of a wider type. `rows_per_chunk` are those of a group.
struct KernelProblem {
  KernelProblem(DType dtype, DType residual_dtype, DType weight_dtype, int64_t rows, int64_t cols,
                int64_t rows_per_chunk, int64_t groups = 1)
      : groups(groups),
        cols(cols),
        residual_dtype(residual_dtype),
        weight_dtype(weight_dtype),
        input(random_numbers(dtype, rows * cols)),
        grad_output(random_numbers(dtype, rows * cols)),
        residual(random_numbers(residual_dtype, rows * cols)),
        grad_residual(random_numbers(residual_dtype, rows * cols)),
        gate(random_numbers(residual_dtype, rows * cols)),
        cos(random_numbers(residual_dtype, rows * cols)),
        sin(random_numbers(residual_dtype, rows * cols)),
        square_sum(rows * size_of(compute_dtype(dtype))),
        dot(square_sum.size()),
        weight(random_numbers(weight_dtype, groups * cols)),
        output(input.size()),
        residual_out(residual.size()),
        grad_input(residual.size()),
        grad_gate(gate.size()),
        grad_weight(weight.size()),
        chunks(chunk_count(rows / groups, rows_per_chunk)),
        scale(groups * (padded_cols(dtype, cols) + 3 * kLongestBlock) * size_of(compute_dtype(dtype))),
        partials(chunks * scale.size()) {
    RowLayout layout;
    layout.dims = 1;
    layout.sizes[0] = rows;
    layout.strides[0] = cols;
    const Weight of_groups = {weight.data(), weight_dtype, 0, groups};
    const RmsNormArgs args = {.dtype = dtype,
                              .rows = rows,
                              .cols = cols,
                              .eps = 1e-5,
                              .weight = of_groups,
                              .input = input.data(),
                              .input_rows = layout,
                              .output = output.data(),
                              .output_rows = layout};
    const RmsNormBackwardArgs backward_args = {.dtype = residual_dtype,
                                               .grad_output_dtype = dtype,
                                               .rows = rows,
                                               .cols = cols,
                                               .eps = 1e-5,
                                               .weight = of_groups,
                                               .grad_output = grad_output.data(),
                                               .grad_output_rows = layout,
                                               .input = residual.data(),
                                               .input_rows = layout,
                                               .grad_residual = grad_residual.data(),
                                               .grad_residual_rows = layout,
                                               .grad_input = grad_input.data(),
                                               .grad_input_rows = layout,
                                               .grad_weight_partials = partials.data()};
    const auto with_scale = [&]<class Args>(const Args& args) {
      return CpuArgs<Args>{args, /*stream=*/false, rows_per_chunk, scale.data()};
    };
    forward = with_scale(args);
    add = with_scale(AddRmsNormArgs{args, residual_dtype, residual.data(), layout, residual_out.data(), layout, 1.0});
    backward = with_scale(backward_args);
    gated = with_scale(GatedRmsNormArgs{args, {}, residual_dtype, gate.data(), layout});
    gated_backward = with_scale(
        GatedRmsNormBackwardArgs{backward_args, {}, residual_dtype, gate.data(), layout, grad_gate.data(), layout});
    rope = with_scale(RmsNormRopeArgs{args, {}});
    rope_backward = with_scale(RmsNormRopeBackwardArgs{backward_args, {}});
    RowLayout of_sums = layout;
    of_sums.strides[0] = 1;
    stats = with_scale(RmsNormStatsArgs{dtype, rows, cols, input.data(), layout, square_sum.data(), of_sums});
    from_stats = with_scale(RmsNormFromStatsArgs{args, cols, square_sum.data(), of_sums});
    backward_stats =
        with_scale(RmsNormBackwardStatsArgs{backward_args, square_sum.data(), of_sums, dot.data(), of_sums});
    backward_stats.grad_residual = nullptr;
    backward_stats.grad_input = backward_stats.grad_weight_partials = nullptr;
    backward_from_stats =
        with_scale(RmsNormBackwardFromStatsArgs{backward_args, cols, square_sum.data(), of_sums, dot.data(), of_sums});
    for (RmsNormBackwardArgs* args :
         {static_cast<RmsNormBackwardArgs*>(&gated_backward), static_cast<RmsNormBackwardArgs*>(&rope_backward)}) {
      args->dtype = dtype;
      args->input = input.data();
      args->grad_residual = nullptr;
    }
  }
  KernelProblem(const KernelProblem&) = delete;

  // Results that are rounded on the way, and a scaled branch of a sum.
  void set_casting(Casting casting, double alpha) {
    for (RmsNormArgs* args :
         {static_cast<RmsNormArgs*>(&forward), static_cast<RmsNormArgs*>(&add), static_cast<RmsNormArgs*>(&gated),
          static_cast<RmsNormArgs*>(&rope), static_cast<RmsNormArgs*>(&from_stats)}) {
      args->casting = casting;
    }
    for (RmsNormBackwardArgs* args :
         {static_cast<RmsNormBackwardArgs*>(&backward), static_cast<RmsNormBackwardArgs*>(&gated_backward),
          static_cast<RmsNormBackwardArgs*>(&rope_backward), static_cast<RmsNormBackwardArgs*>(&backward_stats),
          static_cast<RmsNormBackwardArgs*>(&backward_from_stats)}) {
      args->casting = casting;
    }
    add.alpha = alpha;
  }

  // Rows with the angles of every `heads`-th one.
  void set_rotation(const PairedColumns& paired, bool angle_of_pair, int64_t heads) {
    const int64_t angles = angle_of_pair ? paired.pairs : 2 * paired.pairs, rows = forward.rows;
    const RowLayout layout = {2, {rows / heads, heads}, {angles, 0}};
    rope.rotation = rope_backward.rotation = {paired.are_neighbours, angle_of_pair, residual_dtype, paired.offset,
                                              paired.pairs,          cos.data(),    sin.data(),     layout};
  }

  // Of every group: the scale as kernels of `dtype` read it, and grad_weight of the partials that they wrote, or some
  // of it.
  void make_scale(DType dtype, double weight_offset, const PairedColumns& paired = {}) {
    write_scale(dtype, weight_offset, scale.data(), paired);
  }
  void write_scale(DType dtype, double weight_offset, void* scale, const PairedColumns& paired = {}) const {
    const HeldOrder order(dtype, cols, paired);
    for (int64_t group = 0; group < groups; group++) {
      write_scale(dtype, weight_offset, scale, order, group, 0, order.held_cols());
    }
  }
  void write_scale(DType dtype, double weight_offset, void* scale, const HeldOrder& order, int64_t group, int64_t begin,
                   int64_t end) const {
    order.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
      rms_norm_kernels().scale(
          dtype, weight_dtype, weight.data() + (group * cols + column) * size_of(weight_dtype), weight_offset,
          static_cast<char*>(scale) + (group * order.held_cols() + held) * size_of(compute_dtype(dtype)), count);
    });
  }
  void sum_grad_weight(DType dtype, const PairedColumns& paired = {}) {
    const HeldOrder order(dtype, cols, paired);
    for (int64_t group = 0; group < groups; group++) sum_grad_weight(dtype, order, group, 0, order.held_cols());
  }
  void sum_grad_weight(DType dtype, const HeldOrder& order, int64_t group, int64_t begin, int64_t end) {
    order.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
      rms_norm_backward_kernels().grad_weight(
          dtype, weight_dtype, partials.data() + (group * order.held_cols() + held) * size_of(compute_dtype(dtype)),
          chunks, groups * order.held_cols(), grad_weight.data() + (group * cols + column) * size_of(weight_dtype),
          count);
    });
  }

  int64_t groups, cols;
  DType residual_dtype, weight_dtype;
  std::vector<char> input, grad_output, residual, grad_residual, gate, cos, sin, square_sum, dot, weight, output,
      residual_out, grad_input, grad_gate, grad_weight;
  int64_t chunks;
  std::vector<char> scale, partials;
  CpuArgs<RmsNormArgs> forward;
  CpuArgs<AddRmsNormArgs> add;
  CpuArgs<RmsNormBackwardArgs> backward;
  CpuArgs<GatedRmsNormArgs> gated;  // with a gate of residual_dtype
  CpuArgs<GatedRmsNormBackwardArgs> gated_backward;
  CpuArgs<RmsNormRopeArgs> rope;  // with angles of residual_dtype
  CpuArgs<RmsNormRopeBackwardArgs> rope_backward;
  CpuArgs<RmsNormStatsArgs> stats;
  CpuArgs<RmsNormFromStatsArgs> from_stats;
  CpuArgs<RmsNormBackwardStatsArgs> backward_stats;
  CpuArgs<RmsNormBackwardFromStatsArgs> backward_from_stats;
};

// Calls visit(paired, angle_of_pair) for rotations of rows.
template <class Visit>
void each_rotation(int64_t cols, const Visit& visit) {
  for (const bool are_neighbours : {false, true}) {
    visit(PairedColumns{0, cols / 2, are_neighbours}, false);
    visit(PairedColumns{cols > 3 ? 3 : 0, cols > 3 ? (cols - 3) / 3 : 0, are_neighbours}, true);
  }
}

// How gates are applied.
constexpr Gating kGatings[] = {
    {Activation::silu, true}, {Activation::silu, false}, {Activation::sigmoid, true}, {Activation::sigmoid, false}};

}  // namespace normops::cpu
