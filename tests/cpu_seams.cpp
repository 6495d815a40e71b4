// Runs the toy kernels and compares their results with definitions in double. The first line names the instruction set;
// the others hash the results, and name what is wrong.
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "isa.h"
#include "kernel_problem.h"
#include "toys/toys.h"

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

double tolerance(DType dtype) {
  return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : dtype == DType::float16 ? 2e-3 : 1e-2;
}

// Heads of tokens, as slices of a projection that has twice as many; each token has its angles.
struct Toy {
  Toy(DType dtype, int64_t cols, int64_t pairs)
      : dtype(dtype),
        cols(cols),
        pairs(pairs),
        input(random_numbers(dtype, kRows * 2 * cols)),
        grad_output(random_numbers(dtype, kRows * cols)),
        cos(random_numbers(dtype, kTokens * cols)),
        sin(random_numbers(dtype, kTokens * cols)),
        weight(random_numbers(compute_dtype(dtype), cols)),
        scale(toy_kernels().held_cols(dtype, cols, pairs) * 8) {
    toy_kernels().to_pairs(dtype, weight.data(), cols, pairs, scale.data());
    for (int64_t row = 0; row < kRows; row++) {
      double sum = 0;
      for (int64_t c = 0; c < cols; c++) sum += x(row, c) * x(row, c);
      rstd.push_back(1 / std::sqrt(sum / cols + 1e-5));
      for (int64_t c = 0; c < cols; c++) normalized.push_back(x(row, c) * rstd[row] * w(c));
    }
  }

  RowLayout rows(int64_t of_token, int64_t of_head) const { return {2, {kTokens, kHeads}, {of_token, of_head}}; }
  double x(int64_t row, int64_t c) const {
    return number(dtype, input.data(), row / kHeads * 2 * kHeads * cols + row % kHeads * cols + c);
  }
  double w(int64_t c) const { return number(compute_dtype(dtype), weight.data(), c); }
  double angle(const std::vector<char>& of, int64_t row, int64_t c) const {
    return number(dtype, of.data(), row / kHeads * cols + c);
  }
  double y(int64_t row, int64_t c) const { return normalized[row * cols + c]; }

  RmsNormArgs args(void* output, const RowLayout& output_rows) const {
    return {.dtype = dtype,
            .rows = kRows,
            .cols = cols,
            .eps = 1e-5,
            .weight = {nullptr, dtype, 0, 1},
            .input = input.data(),
            .input_rows = rows(2 * kHeads * cols, cols),
            .output = output,
            .output_rows = output_rows};
  }
  template <class Args>
  CpuArgs<Args> with_scale(const Args& args) const {
    return {args, false, 12, scale.data(), nullptr};
  }
  void report(const char* what, const std::vector<char>& result) const {
    std::printf("%s dtype %d cols %" PRId64 " pairs %" PRId64 ": %016" PRIx64 "\n", what, static_cast<int>(dtype), cols,
                pairs, hash(result));
  }
  void compare(const char* what, double actual, double expected, double scale) const {
    if (std::abs(actual - expected) <= tolerance(dtype) * scale) return;
    std::printf("wrong: %s dtype %d cols %" PRId64 " pairs %" PRId64 ": %g instead of %g\n", what,
                static_cast<int>(dtype), cols, pairs, actual, expected);
  }

  void rotate(bool in_place) {
    const std::vector<char> given = input;
    std::vector<char> output(kRows * cols * size_of(dtype));
    const RowLayout output_rows = in_place ? rows(2 * kHeads * cols, cols) : RowLayout{1, {kRows}, {cols}};
    void* const target = in_place ? input.data() : output.data();
    toy_kernels().rotated(
        with_scale(RotatedArgs{args(target, output_rows), pairs, cos.data(), sin.data(), rows(cols, 0)}), 0, kRows);
    if (in_place) {
      for (int64_t row = 0; row < kRows; row++) {
        const char* const written = input.data() + (row / kHeads * 2 * kHeads + row % kHeads) * cols * size_of(dtype);
        std::memcpy(output.data() + row * cols * size_of(dtype), written, cols * size_of(dtype));
      }
      input = given;
    }
    report(in_place ? "in place" : pairs > 0 ? "pairs" : "neighbours", output);
    for (int64_t row = 0; row < kRows; row++) {
      for (int64_t c = 0; c < cols; c++) {
        double expected = y(row, c), size = std::abs(expected);
        if (pairs == 0) {
          expected = expected * angle(cos, row, c) + y(row, c ^ 1) * angle(sin, row, c);
          size = 4 * (size + std::abs(y(row, c ^ 1)));
        } else if (c < 2 * pairs) {
          const int64_t first = c % pairs, other = c < pairs ? c + pairs : first;
          expected = expected * angle(cos, row, first) + (c < pairs ? -1 : 1) * y(row, other) * angle(sin, row, first);
          size = 4 * (size + std::abs(y(row, other)));
        }
        compare("rotated", number(dtype, output.data(), row * cols + c), expected, 1e-3 + size);
      }
    }
  }

  void quantize() const {
    std::vector<char> output(kRows * cols);
    std::vector<float> steps(kRows);
    const RowLayout output_rows = {1, {kRows}, {cols}};
    std::vector<char> plain(scale.size());  // in the order of kernels without pairs
    toy_kernels().to_pairs(dtype, weight.data(), cols, 0, plain.data());
    auto quantized = with_scale(QuantizedArgs{args(output.data(), output_rows), steps.data(), {1, {kRows}, {1}}});
    quantized.scale = plain.data();
    toy_kernels().quantized(quantized, 0, kRows);
    report("quantized", output);
    for (int64_t row = 0; row < kRows; row++) {
      double largest = 0;
      for (int64_t c = 0; c < cols; c++) largest = std::max(largest, std::abs(y(row, c)));
      if (std::abs(steps[row] * 127 / largest - 1) > 1e-5) compare("step", steps[row], largest / 127, 0);
      for (int64_t c = 0; c < cols; c++) {
        const auto quantum = static_cast<signed char>(output[row * cols + c]);
        if (std::abs(quantum - y(row, c) / (largest / 127)) > 0.501) compare("quantum", quantum, NAN, 0);
      }
    }
  }

  void rotate_back() const {
    std::vector<char> grad_input(kRows * cols * size_of(dtype));
    const int64_t chunks = chunk_count(kRows, 12), held = scale.size() / 8;
    std::vector<char> partials(chunks * held * 8), partial(cols * 8);
    const RowLayout contiguous = {1, {kRows}, {cols}};
    const RmsNormBackwardArgs backward = {.dtype = dtype,
                                          .grad_output_dtype = dtype,
                                          .rows = kRows,
                                          .cols = cols,
                                          .eps = 1e-5,
                                          .weight = {nullptr, dtype, 0, 1},
                                          .grad_output = grad_output.data(),
                                          .grad_output_rows = contiguous,
                                          .input = input.data(),
                                          .input_rows = rows(2 * kHeads * cols, cols),
                                          .grad_residual = nullptr,
                                          .grad_residual_rows = {},
                                          .grad_input = grad_input.data(),
                                          .grad_input_rows = contiguous,
                                          .grad_weight_partials = partials.data()};
    toy_backward_kernels().rotated(
        with_scale(RotatedBackwardArgs{backward, pairs, cos.data(), sin.data(), rows(cols, 0)}), 0, chunks);
    report("back", grad_input);
    std::vector<double> grad_weight(cols), sizes(cols);
    for (int64_t row = 0; row < kRows; row++) {
      std::vector<double> dy(cols);
      double dot = 0, size = 0;
      for (int64_t c = 0; c < cols; c++) {
        const auto of = [&](int64_t c) { return number(dtype, grad_output.data(), row * cols + c); };
        dy[c] = of(c);
        if (c < 2 * pairs) {
          const int64_t first = c % pairs, other = c < pairs ? c + pairs : first;
          dy[c] = of(c) * angle(cos, row, first) + (c < pairs ? 1 : -1) * of(other) * angle(sin, row, first);
        }
        dot += dy[c] * w(c) * x(row, c);
        size += std::abs(dy[c] * w(c) * x(row, c));
        grad_weight[c] += dy[c] * x(row, c) * rstd[row];
        sizes[c] += 16 * std::abs(x(row, c)) * rstd[row];
      }
      const double r = rstd[row];
      for (int64_t c = 0; c < cols; c++) {
        const double expected = dy[c] * r * w(c) - x(row, c) * r * r * r * dot / cols;
        compare("gradient", number(dtype, grad_input.data(), row * cols + c), expected,
                0.1 + 16 * std::abs(r * w(c)) + std::abs(x(row, c) * r * r * r * size / cols));
      }
    }
    std::vector<double> sums(cols);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const int64_t bytes = size_of(compute_dtype(dtype));
      toy_kernels().from_pairs(dtype, partials.data() + chunk * held * bytes, cols, pairs, partial.data());
      for (int64_t c = 0; c < cols; c++) sums[c] += number(compute_dtype(dtype), partial.data(), c);
    }
    for (int64_t c = 0; c < cols; c++) compare("grad_weight", sums[c], grad_weight[c], 0.1 + sizes[c]);
  }

  static constexpr int64_t kTokens = 17, kHeads = 3, kRows = kTokens * kHeads;
  DType dtype;
  int64_t cols, pairs;
  std::vector<char> input, grad_output, cos, sin, weight, scale;
  std::vector<double> rstd, normalized;
};

}  // namespace

int main() {
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    for (const auto [cols, pairs] : {std::pair<int64_t, int64_t>{8, 4},
                                     {80, 40},
                                     {96, 48},
                                     {128, 64},
                                     {100, 32},
                                     {256, 128},
                                     {2500, 1250},
                                     {2500, 300},
                                     {64, 0},
                                     {70, 0},
                                     {1200, 0}}) {
      Toy toy(dtype, cols, pairs);
      toy.rotate(/*in_place=*/false);
      toy.rotate(/*in_place=*/true);
      toy.quantize();
      if (pairs > 0) toy.rotate_back();
    }
  }
}
