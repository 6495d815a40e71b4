// Runs the kernel of toys/quantized.h and compares its results with the definition in double. The first line names the
// instruction set; the others hash the results, and name what is wrong.
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "isa.h"
#include "kernel_problem.h"
#include "toys/quantized.h"

namespace {

using namespace normops;
using namespace normops::cpu;

double number(DType dtype, const void* data, int64_t index) {
  double result = 0;
  dispatch(dtype, [&]<class T>() {
    const T value = static_cast<const T*>(data)[index];
    if constexpr (std::is_same_v<T, bfloat16>) {
      const uint32_t bits = uint32_t{value.bits} << 16;
      float number;
      std::memcpy(&number, &bits, sizeof number);
      result = number;
    } else if constexpr (std::is_same_v<T, float16>) {
      const int exponent = value.bits >> 10 & 31, mantissa = value.bits & 1023;
      const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      result = value.bits >> 15 ? -magnitude : magnitude;
    } else {
      result = value;
    }
  });
  return result;
}

void quantize(DType dtype, int64_t cols) {
  constexpr int64_t kRows = 51;
  const RowLayout rows = {1, {kRows}, {cols}};
  KernelProblem p(dtype, dtype, compute_dtype(dtype), kRows, cols, kRows);
  p.make_scale(dtype, 0);
  std::vector<char> output(kRows * cols);
  std::vector<float> steps(kRows);
  const auto args = [&](auto args) {
    args.output = output.data();
    args.output_rows = rows;
    return args;
  };
  quantized_kernels().rows({QuantizedArgs{args(p.forward), steps.data(), {1, {kRows}, {1}}}, false, 0, p.scale.data()},
                           0, kRows);
  std::printf("quantized dtype %d cols %" PRId64 ": %016" PRIx64 "\n", static_cast<int>(dtype), cols, hash(output));
  for (int64_t row = 0; row < kRows; row++) {
    std::vector<double> y(cols);
    double sum = 0, largest = 0;
    for (int64_t c = 0; c < cols; c++) {
      y[c] = number(dtype, p.input.data(), row * cols + c);
      sum += y[c] * y[c];
    }
    for (int64_t c = 0; c < cols; c++) {
      y[c] *= number(compute_dtype(dtype), p.weight.data(), c) / std::sqrt(sum / cols + 1e-5);
      largest = std::max(largest, std::abs(y[c]));
    }
    if (std::abs(steps[row] * 127 / largest - 1) > 1e-5) std::printf("wrong: a step of %g\n", steps[row]);
    for (int64_t c = 0; c < cols; c++) {
      const auto quantum = static_cast<signed char>(output[row * cols + c]);
      if (std::abs(quantum - y[c] / (largest / 127)) > 0.501) std::printf("wrong: %d for %g\n", quantum, y[c]);
    }
  }
}

}  // namespace

int main() {
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    for (const int64_t cols : {8, 64, 70, 80, 100, 128, 256, 1200, 2500}) quantize(dtype, cols);
  }
}
