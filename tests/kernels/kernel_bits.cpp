// Runs the CPU kernels, without torch, on pseudo-random rows of every dtype and prints a hash of each result. The first
// line names the instruction set; the others are the same wherever multiply-adds are fused.
#include <cinttypes>
#include <cstdio>

#include "isa.h"
#include "kernel_problem.h"

namespace {

using namespace normops;
using namespace normops::cpu;

void run(DType dtype, DType residual_dtype, DType weight_dtype, int64_t cols, int64_t groups = 1,
         Rounding rounding = {}, double alpha = 1) {
  constexpr int64_t kRows = 21, kRowsPerLeaf = 5;
  KernelProblem p(random_numbers, dtype, residual_dtype, weight_dtype, kRows * groups, cols, kRowsPerLeaf, groups);
  p.each([&](CpuArgs& args) { args.rounding = rounding; });
  p.add.alpha = alpha;
  p.make_scale(dtype, 1.0);
  rms_norm_kernels().forward(p.forward, 0, kRows * groups);
  const uint64_t forward = hash(p.output);
  p.make_scale(residual_dtype, 1.0);
  add_rms_norm_kernel()(p.add, 0, kRows * groups);
  rms_norm_backward_kernels().backward(p.backward, p.all_rows);
  p.sum_grad_weight(residual_dtype);
  std::vector<uint64_t> results = {forward, hash(p.output), hash(p.residual_out), hash(p.grad_input),
                                   hash(p.grad_weight)};
  rms_norm_backward_kernels().backward(p.backward_stats, p.all_rows);
  results.insert(results.end(), {hash(p.square_sum), hash(p.dot)});
  rms_norm_backward_kernels().backward(p.backward_from_stats, p.all_rows);
  p.sum_grad_weight(residual_dtype);
  results.insert(results.end(), {hash(p.grad_input), hash(p.grad_weight)});
  p.make_scale(dtype, 1.0);
  rms_norm_kernels().forward(p.stats, 0, kRows * groups);
  rms_norm_kernels().forward(p.from_stats, 0, kRows * groups);
  results.insert(results.end(), {hash(p.square_sum), hash(p.output)});
  std::vector<char> scratch(std::max(scratch_rows(p.gated), scratch_rows(p.gated_backward)) * 2 *
                            padded_cols(dtype, cols) * 8);
  for (const Gating gating : kGatings) {
    p.gated.gating = p.gated_backward.gating = gating;
    p.gated.row_scratch = p.gated_backward.row_scratch = scratch.data();
    gated_rms_norm_kernel()(p.gated, 0, kRows * groups);
    gated_rms_norm_backward_kernel()(p.gated_backward, p.all_rows);
    p.sum_grad_weight(dtype);
    results.insert(results.end(), {hash(p.output), hash(p.grad_input), hash(p.grad_gate), hash(p.grad_weight)});
  }
  each_rotation(cols, [&](const RotaryColumns& paired, bool angle_of_pair) {
    p.set_rotation(paired, angle_of_pair, 3);
    p.make_scale(dtype, 1.0, paired);
    rms_norm_rope_kernel()(p.rope, 0, kRows * groups);
    rms_norm_rope_backward_kernel()(p.rope_backward, p.all_rows);
    p.sum_grad_weight(dtype, paired);
    results.insert(results.end(), {hash(p.output), hash(p.grad_input), hash(p.grad_weight)});
  });
  std::printf("dtype %d residual %d weight %d groups %" PRId64 " cols %" PRId64 ":", static_cast<int>(dtype),
              static_cast<int>(residual_dtype), static_cast<int>(weight_dtype), groups, cols);
  if (rounding.normalized || alpha != 1) std::printf(" casts %d alpha %g:", rounding.normalized, alpha);
  for (const uint64_t result : results) std::printf(" %016" PRIx64, result);
  std::printf("\n");
}

void run_channels(DType dtype, int64_t samples, int64_t channels, int64_t positions, bool is_activated) {
  const int64_t rows = samples * positions;
  const std::vector<char> x = random_numbers(dtype, rows * channels), dy = random_numbers(dtype, rows * channels),
                          scale = random_numbers(DType::float32, channels),
                          bias = random_numbers(DType::float32, channels);
  std::vector<char> output(x.size()), grad_input(x.size());
  ChannelProblem p(dtype, samples, channels, positions, is_activated, scale.data(), bias.data());
  p.set(kInput, x.data()), p.set(kOutput, output.data());
  p.set(kGradOutput, dy.data()), p.set(kGradInput, grad_input.data());
  channel_rms_norm_kernels().forward(p.args, 0, rows);
  channel_rms_norm_kernels().backward(p.args, {0, rows, 0, 1});
  std::printf("channels: dtype %d activated %d [%" PRId64 ", %" PRId64 ", %" PRId64 "]:", static_cast<int>(dtype),
              is_activated, samples, channels, positions);
  for (const uint64_t result :
       {hash(output), hash(grad_input), hash(p.sums(p.weight_sums)), hash(p.sums(p.bias_sums))}) {
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
  for (const DType dtype : kDTypes) {
    for (const int64_t cols : {1, 64, 100, 1025}) {
      run(dtype, dtype, dtype, cols, 3);
      if (size_of(dtype) == 2) run(dtype, DType::float32, dtype, cols, 3);
      run(dtype, dtype, dtype, cols, 1, {true, true}, 0.22);
      if (size_of(dtype) == 2) run(dtype, DType::float32, dtype, cols, 1, {true, true}, 0.22);
      run(dtype, dtype, dtype, cols, 1, {}, 0.22);
    }
  }
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const bool is_activated : {false, true}) {
      for (const int64_t channels : {1, 5, 64, 100, 1025}) {
        run_channels(dtype, 2, channels, 49, is_activated);
        run_channels(dtype, 1, channels, 300, is_activated);
      }
    }
  }
}
