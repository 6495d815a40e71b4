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

void run(DType dtype, DType residual_dtype, DType weight_dtype, int64_t cols) {
  constexpr int64_t kRows = 21, kRowsPerChunk = 12;
  KernelProblem p(dtype, residual_dtype, weight_dtype, kRows, cols, kRowsPerChunk);
  const RmsNormKernels& kernels = rms_norm_kernels();
  const RmsNormBackwardKernels& backward_kernels = rms_norm_backward_kernels();
  kernels.scale(dtype, weight_dtype, p.weight.data(), 1.0, p.scale.data(), 0, cols);
  kernels.forward.rows(p.forward, 0, kRows);
  const uint64_t forward = hash(p.output);
  kernels.scale(residual_dtype, weight_dtype, p.weight.data(), 1.0, p.scale.data(), 0, cols);
  add_rms_norm_kernels().rows(p.add, 0, kRows);
  backward_kernels.rows(p.backward, 0, p.chunks);
  backward_kernels.grad_weight(residual_dtype, weight_dtype, p.partials.data(), p.chunks, cols, p.grad_weight.data(), 0,
                               cols);
  std::printf("dtype %d residual %d weight %d cols %" PRId64 ":", static_cast<int>(dtype),
              static_cast<int>(residual_dtype), static_cast<int>(weight_dtype), cols);
  for (const uint64_t result :
       {forward, hash(p.output), hash(p.residual_out), hash(p.grad_input), hash(p.grad_weight)}) {
    std::printf(" %016" PRIx64, result);
  }
  std::printf("\n");
}

}  // namespace

int main() {
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    for (const DType weight_dtype : kDTypes) {
      for (const int64_t cols : {1, 5, 16, 63, 64, 100, 769, 1025, 4096}) {
        run(dtype, dtype, weight_dtype, cols);
        if (size_of(dtype) == 2) run(dtype, DType::float32, weight_dtype, cols);
      }
    }
  }
}
