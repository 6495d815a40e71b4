// Pseudo-random problems for the programs that run the CPU kernels without torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "add_rms_norm_kernel.h"
#include "gated_rms_norm_kernel.h"

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
        weight_dtype(weight_dtype),
        input(random_numbers(dtype, rows * cols)),
        grad_output(random_numbers(dtype, rows * cols)),
        residual(random_numbers(residual_dtype, rows * cols)),
        grad_residual(random_numbers(residual_dtype, rows * cols)),
        gate(random_numbers(residual_dtype, rows * cols)),
        weight(random_numbers(weight_dtype, groups * cols)),
        output(input.size()),
        residual_out(residual.size()),
        grad_input(residual.size()),
        grad_gate(gate.size()),
        grad_weight(weight.size()),
        chunks(chunk_count(rows / groups, rows_per_chunk)),
        scale(groups * std::max(padded_cols(dtype, cols), padded_cols(residual_dtype, cols)) *
              size_of(compute_dtype(dtype))),
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
    add = with_scale(AddRmsNormArgs{args, residual_dtype, residual.data(), layout, residual_out.data(), layout});
    backward = with_scale(backward_args);
    gated = with_scale(GatedRmsNormArgs{args, {}, residual_dtype, gate.data(), layout});
    gated_backward = with_scale(
        GatedRmsNormBackwardArgs{backward_args, {}, residual_dtype, gate.data(), layout, grad_gate.data(), layout});
    gated_backward.dtype = dtype;
    gated_backward.input = input.data();
    gated_backward.grad_residual = nullptr;
  }
  KernelProblem(const KernelProblem&) = delete;

  // Of every group: the scale as kernels of `dtype` read it, and grad_weight of the partials that they wrote.
  void make_scale(DType dtype, double weight_offset) { write_scale(dtype, weight_offset, scale.data()); }
  void write_scale(DType dtype, double weight_offset, void* scale) const {
    for (int64_t group = 0; group < groups; group++) {
      rms_norm_kernels().scale(dtype, weight_dtype, weight.data(), weight_offset, cols, scale, group, 0, cols);
    }
  }
  void sum_grad_weight(DType dtype) {
    for (int64_t group = 0; group < groups; group++) {
      rms_norm_backward_kernels().grad_weight(dtype, weight_dtype, partials.data(), chunks, groups, cols,
                                              grad_weight.data(), group, 0, cols);
    }
  }

  int64_t groups, cols;
  DType weight_dtype;
  std::vector<char> input, grad_output, residual, grad_residual, gate, weight, output, residual_out, grad_input,
      grad_gate, grad_weight;
  int64_t chunks;
  std::vector<char> scale, partials;
  CpuArgs<RmsNormArgs> forward;
  CpuArgs<AddRmsNormArgs> add;
  CpuArgs<RmsNormBackwardArgs> backward;
  CpuArgs<GatedRmsNormArgs> gated;  // with a gate of residual_dtype
  CpuArgs<GatedRmsNormBackwardArgs> gated_backward;
};

// How gates are applied.
constexpr Gating kGatings[] = {
    {Activation::silu, true}, {Activation::silu, false}, {Activation::sigmoid, true}, {Activation::sigmoid, false}};

}  // namespace normops::cpu
