// Runs the CPU kernels, without torch, on pseudo-random rows of every dtype and prints a hash of each result. The first
// line names the instruction set; the others are the same wherever multiply-adds are fused.
#include <cinttypes>
#include <cstdio>

#include "isa.h"
#include "kernel_problem.h"

namespace {

using namespace normops;
using namespace normops::cpu;

uint64_t hash(const std::vector<char>& bytes) {  // FNV-1a
  uint64_t value = 14695981039346656037u;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value;
}

void run(DType dtype, DType weight_dtype, int64_t cols) {
  constexpr int64_t kRows = 7, kRowsPerChunk = 4;
  KernelProblem p(dtype, weight_dtype, kRows, cols, kRowsPerChunk);
  const RmsNormKernels& kernels = rms_norm_kernels();
  kernels.scale(dtype, weight_dtype, p.weight.data(), 1.0, p.scale.data(), 0, cols);
  kernels.forward(p.forward, 0, kRows);
  kernels.backward(p.backward, 0, p.chunks);
  kernels.grad_weight(dtype, weight_dtype, p.partials.data(), p.chunks, cols, p.grad_weight.data(), 0, cols);
  std::printf("dtype %d weight %d cols %" PRId64 ": %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n",
              static_cast<int>(dtype), static_cast<int>(weight_dtype), cols, hash(p.output), hash(p.grad_input),
              hash(p.grad_weight));
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
