// Runs the CPU kernels, without torch, on pseudo-random rows of every dtype and prints a hash of each result. The first
// line names the instruction set; the others are the same wherever multiply-adds are fused.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "isa.h"
#include "rms_norm_kernel.h"

namespace {

using namespace normops;
using namespace normops::cpu;

constexpr DType kDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

uint64_t random_bits() {  // xorshift64
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

size_t size_of(DType dtype) {
  return dispatch(dtype, []<class T>() { return sizeof(T); });
}

std::vector<char> random_numbers(DType dtype, int64_t count) {
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

uint64_t hash(const std::vector<char>& bytes) {  // FNV-1a
  uint64_t value = 14695981039346656037u;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value;
}

void run(DType dtype, DType weight_dtype, int64_t cols) {
  constexpr int64_t kRows = 7, kRowsPerChunk = 4, kChunks = 2;
  const auto input = random_numbers(dtype, kRows * cols), grad_output = random_numbers(dtype, kRows * cols);
  const auto grad_residual = random_numbers(dtype, kRows * cols), weight = random_numbers(weight_dtype, cols);
  std::vector<char> output(input.size()), grad_input(input.size()), grad_weight(weight.size());
  std::vector<double> scale(padded_cols(cols)), partials(kChunks * padded_cols(cols));
  RowLayout rows;
  rows.dims = 1;
  rows.sizes[0] = kRows;
  rows.strides[0] = cols;

  const RmsNormKernels& kernels = rms_norm_kernels();
  kernels.scale(dtype, weight_dtype, weight.data(), 1.0, scale.data(), 0, cols);
  kernels.forward({.dtype = dtype,
                   .cols = cols,
                   .eps = 1e-5,
                   .input = input.data(),
                   .input_rows = rows,
                   .scale = scale.data(),
                   .output = output.data(),
                   .output_rows = rows},
                  0, kRows);
  kernels.backward({.dtype = dtype,
                    .rows = kRows,
                    .cols = cols,
                    .eps = 1e-5,
                    .grad_output = grad_output.data(),
                    .grad_output_rows = rows,
                    .input = input.data(),
                    .input_rows = rows,
                    .scale = scale.data(),
                    .grad_residual = grad_residual.data(),
                    .grad_residual_rows = rows,
                    .grad_input = grad_input.data(),
                    .grad_input_rows = rows,
                    .grad_weight_partials = partials.data(),
                    .rows_per_chunk = kRowsPerChunk},
                   0, kChunks);
  kernels.grad_weight(dtype, weight_dtype, partials.data(), kChunks, cols, grad_weight.data(), 0, cols);
  std::printf("dtype %d weight %d cols %" PRId64 ": %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n",
              static_cast<int>(dtype), static_cast<int>(weight_dtype), cols, hash(output), hash(grad_input),
              hash(grad_weight));
}

}  // namespace

int main() {
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    for (const DType weight_dtype : kDTypes) {
      for (const int64_t cols : {1, 5, 16, 63, 64, 100, 769, 1025, 4096}) run(dtype, weight_dtype, cols);
    }
  }
}
