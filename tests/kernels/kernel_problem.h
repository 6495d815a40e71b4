// Pseudo-random problems for the programs that run the CPU kernels without torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "division.h"
#include "kernels.h"

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
// also the backward's input, and the gate may have a wider dtype. `rows_per_leaf` counts rows of one group. Rows have
// padding between them, but none after the last one. make(dtype, count) returns memory of a vector's interface.
template <class Memory>
struct KernelProblem {
  template <class Make>
  KernelProblem(const Make& make, DType dtype, DType residual_dtype, DType weight_dtype, int64_t rows, int64_t cols,
                int64_t rows_per_leaf, int64_t groups = 1, int64_t padding = 0)
      : groups(groups),
        cols(cols),
        residual_dtype(residual_dtype),
        weight_dtype(weight_dtype),
        count((rows - 1) * (cols + padding) + cols),
        input(make(dtype, count)),
        grad_output(make(dtype, count)),
        residual(make(residual_dtype, count)),
        grad_residual(make(residual_dtype, count)),
        gate(make(residual_dtype, count)),
        cos(make(residual_dtype, rows * cols)),
        sin(make(residual_dtype, rows * cols)),
        square_sum(make(compute_dtype(dtype), (rows - 1) * (1 + padding) + 1)),
        dot(make(compute_dtype(dtype), (rows - 1) * (1 + padding) + 1)),
        weight(make(weight_dtype, groups * cols)),
        output(make(dtype, count)),
        residual_out(make(residual_dtype, count)),
        grad_input(make(residual_dtype, count)),
        grad_gate(make(residual_dtype, count)),
        grad_weight(make(weight_dtype, groups * cols)),
        all_rows{0, rows / groups, 0, groups},
        leaves(divide_up(rows / groups, rows_per_leaf)),
        scale(groups * (padded_cols(dtype, cols) + 3 * kLongestBlock) * size_of(compute_dtype(dtype))),
        sums(most_sums(leaves) * scale.size()) {
    const auto rows_of = [&](Memory& memory, DType dtype, int64_t cols) -> RowsArg {
      return {memory.data(), dtype, {1, {rows}, {(cols + padding) * size_of(dtype)}}};
    };
    const DType sums_dtype = compute_dtype(dtype);
    of_input = rows_of(input, dtype, cols), of_residual = rows_of(residual, residual_dtype, cols);
    of_output = rows_of(output, dtype, cols), of_residual_out = rows_of(residual_out, residual_dtype, cols);
    of_gate = rows_of(gate, residual_dtype, cols), of_grad_gate = rows_of(grad_gate, residual_dtype, cols);
    of_grad_output = rows_of(grad_output, dtype, cols);
    of_grad_residual = rows_of(grad_residual, residual_dtype, cols);
    of_grad_input = rows_of(grad_input, residual_dtype, cols);
    of_narrow_grad_input = rows_of(grad_input, dtype, cols);
    of_grad_weight = {grad_weight.data(), weight_dtype, {1, {groups}, {cols * size_of(weight_dtype)}}};
    of_square_sum = rows_of(square_sum, sums_dtype, 1), of_dot = rows_of(dot, sums_dtype, 1);
    CpuArgs args = {};
    args.rows = rows, args.cols = args.size = cols;
    args.eps = 1e-5, args.alpha = 1;
    args.weight = {weight.data(), weight_dtype, 0, groups};
    args.part_rows = rows, args.rows_per_leaf = rows_per_leaf, args.scale = scale.data();
    using Tensors = std::initializer_list<std::pair<TensorIndex, const RowsArg*>>;
    const auto with = [](CpuArgs args, Tensors tensors) {
      for (const auto& [index, tensor] : tensors) args.tensors[index] = tensor;
      return args;
    };
    forward = with(args, {{kInput, &of_input}, {kOutput, &of_output}});
    add = with(forward, {{kResidual, &of_residual}, {kResidualOut, &of_residual_out}});
    gated = with(forward, {{kGate, &of_gate}});
    rope = with(forward, {{kCos, &of_cos}, {kSin, &of_sin}});
    from_stats = with(forward, {{kSquareSum, &of_square_sum}});
    stats = with(args, {{kInput, &of_input}, {kSquareSum, &of_square_sum}});
    args.sum_stride = scale.size() / size_of(compute_dtype(dtype)), args.grad_weight_sums = sums.data();
    const CpuArgs narrow =
        with(args, {{kGradOutput, &of_grad_output}, {kInput, &of_input}, {kGradInput, &of_narrow_grad_input}});
    gated_backward = with(narrow, {{kGate, &of_gate}, {kGradGate, &of_grad_gate}});
    rope_backward = with(narrow, {{kCos, &of_cos}, {kSin, &of_sin}});
    backward = with(args, {{kGradOutput, &of_grad_output},
                           {kInput, &of_residual},
                           {kGradResidual, &of_grad_residual},
                           {kGradInput, &of_grad_input}});
    backward_from_stats = with(backward, {{kSquareSum, &of_square_sum}, {kDot, &of_dot}});
    backward_stats = with(backward_from_stats, {{kGradResidual, nullptr}, {kGradInput, nullptr}});
    backward_stats.grad_weight_sums = nullptr;
    from_stats.sums = backward_from_stats.sums = Sums::input;
    stats.sums = backward_stats.sums = Sums::output;
  }
  KernelProblem(const KernelProblem&) = delete;

  // Calls set(args) for the arguments of every kernel.
  template <class Set>
  void each(const Set& set) {
    for (CpuArgs* args : {&forward, &add, &gated, &rope, &stats, &from_stats, &backward, &gated_backward,
                          &rope_backward, &backward_stats, &backward_from_stats}) {
      set(*args);
    }
  }

  // Sets a rotation; each `heads` consecutive rows share their angles.
  void set_rotation(const RotaryColumns& paired, bool angle_of_pair, int64_t heads) {
    const int64_t angles = angle_of_pair ? paired.pairs : 2 * paired.pairs, rows = forward.rows;
    const RowLayout layout = {2, {rows / heads, heads}, {angles * size_of(residual_dtype), 0}};
    of_cos = {cos.data(), residual_dtype, layout};
    of_sin = {sin.data(), residual_dtype, layout};
    rope.rotation = rope_backward.rotation = {paired.are_interleaved, angle_of_pair, paired.offset, paired.pairs};
  }

  // Computes the scale of every group for kernels of `dtype`; sum_grad_weight reduces the sums that they wrote.
  void make_scale(DType dtype, double weight_offset, const RotaryColumns& paired = {}) {
    make_scale(dtype, weight_offset, paired, scale.data());
  }
  void make_scale(DType dtype, double weight_offset, const RotaryColumns& paired, char* target) {
    const ScaleLayout order(dtype, cols, paired);
    for (int64_t group = 0; group < groups; group++) {
      order.each(0, order.packed_cols(), [&](int64_t column, int64_t packed, int64_t count) {
        rms_norm_kernels().scale(
            dtype, weight_dtype, weight.data() + (group * cols + column) * size_of(weight_dtype), weight_offset,
            target + (group * order.packed_cols() + packed) * size_of(compute_dtype(dtype)), count);
      });
    }
  }
  void sum_grad_weight(DType dtype, const RotaryColumns& paired = {}) {
    sum_grad_weight(dtype, paired, sums.data(), scale.size());
  }
  void sum_grad_weight(DType dtype, const RotaryColumns& paired, char* sums, int64_t stride) {
    std::vector<ParameterSum> left;
    each_sum(0, leaves, [&](int64_t, int64_t) { left.push_back({sums + left.size() * stride, left.empty() ? 0 : 1}); });
    const ScaleLayout order(dtype, cols, paired);
    for (int64_t group = 0; group < groups; group++) {
      order.each(0, order.packed_cols(), [&](int64_t column, int64_t packed, int64_t count) {
        rms_norm_backward_kernels().grad_weight(
            dtype, weight_dtype, left.data(), static_cast<int64_t>(left.size()), group * order.packed_cols() + packed,
            grad_weight.data() + (group * cols + column) * size_of(weight_dtype), count);
      });
    }
  }

  int64_t groups, cols;
  DType residual_dtype, weight_dtype;
  int64_t count;
  Memory input, grad_output, residual, grad_residual, gate, cos, sin, square_sum, dot, weight, output, residual_out,
      grad_input, grad_gate, grad_weight;
  Region all_rows;
  int64_t leaves;
  std::vector<char> scale, sums;
  RowsArg of_input, of_residual, of_output, of_residual_out, of_gate, of_grad_gate, of_grad_output, of_grad_residual,
      of_grad_input, of_narrow_grad_input, of_grad_weight, of_square_sum, of_dot, of_cos, of_sin;
  // The gate and the angles have residual_dtype; rows of backwards have dtype, except for rms_norm_backward's.
  CpuArgs forward, add, gated, rope, stats, from_stats;
  CpuArgs backward, gated_backward, rope_backward, backward_stats, backward_from_stats;
};

template <class Make, class... Others>
KernelProblem(const Make&, DType, Others...) -> KernelProblem<std::invoke_result_t<Make, DType, int64_t>>;

// Calls visit(paired, angle_of_pair) for rotations of rows.
template <class Visit>
void each_rotation(int64_t cols, const Visit& visit) {
  for (const bool are_interleaved : {false, true}) {
    visit(RotaryColumns{0, cols / 2, are_interleaved}, false);
    visit(RotaryColumns{cols > 3 ? 3 : 0, cols > 3 ? (cols - 3) / 3 : 0, are_interleaved}, true);
  }
}

// The tested ways to apply a gate.
constexpr Gating kGatings[] = {
    {Activation::silu, true}, {Activation::silu, false}, {Activation::sigmoid, true}, {Activation::sigmoid, false}};

// The channel kernels' arguments for contiguous tensors of the shape [samples, channels, positions].
struct ChannelProblem {
  static constexpr int64_t kRowsPerLeaf = 16;

  ChannelProblem(DType dtype, int64_t samples, int64_t channels, int64_t positions, bool is_activated,
                 const void* scale, const void* bias)
      : channels(channels),
        leaves((samples * positions + kRowsPerLeaf - 1) / kRowsPerLeaf),
        stride(padded_cols(DType::float32, channels)),
        weight_sums(most_sums(leaves) * stride * sizeof(float)),
        bias_sums(weight_sums.size()),
        scratch(kFormedPositions * stride * sizeof(float)),
        layout{dtype, positions, {}, {}, is_activated} {
    args.rows = samples * positions, args.cols = args.size = channels, args.eps = 0.01, args.weight.groups = 1;
    args.scale = scale, args.channels = &layout, args.channel_bias = static_cast<const float*>(bias),
    args.row_scratch = scratch.data();
    args.sum_stride = stride, args.rows_per_leaf = kRowsPerLeaf;
    args.grad_weight_sums = weight_sums.data(), args.grad_bias_sums = bias_sums.data();
  }
  ChannelProblem(const ChannelProblem&) = delete;

  void set(TensorIndex index, const void* data) {
    rows[index] = {const_cast<void*>(data), DType::float32, {}};
    args.tensors[index] = &rows[index];
    layout.channel_strides[index] = layout.positions * size_of(layout.dtype);
    layout.sample_strides[index] = channels * layout.channel_strides[index];
  }

  // Returns the remaining sums of the leaves, without the padding after the channels, which has no values.
  std::vector<char> sums(const std::vector<char>& all) const {
    std::vector<char> result;
    for (int i = 0; i < sum_count(0, leaves); i++) {
      const auto sum = all.begin() + i * stride * sizeof(float);
      result.insert(result.end(), sum, sum + channels * sizeof(float));
    }
    return result;
  }

  int64_t channels, leaves, stride;
  std::vector<char> weight_sums, bias_sums, scratch;
  Channels layout;
  RowsArg rows[kTensorCount] = {};
  CpuArgs args = {};
};

}  // namespace normops::cpu
