// Runs each CPU kernel once, without torch, under callgrind: a dump of its counters for each, labelled. Prints the
// labels and the numbers of elements that the kernels went through.
#include <valgrind/callgrind.h>

#include <cinttypes>
#include <cstdio>
#include <string>

#include "kernel_problem.h"

namespace {

using namespace normops;
using namespace normops::cpu;

constexpr const char* kDTypeNames[] = {"float16", "bfloat16", "float32", "float64"};

template <class Run>
void count(const char* kernel, DType dtype, int64_t rows, int64_t cols, int64_t elements, Run run) {
  const std::string label = std::string(kernel) + " " + std::to_string(rows) + "x" + std::to_string(cols) + " " +
                            kDTypeNames[static_cast<int>(dtype)];
  CALLGRIND_ZERO_STATS;
  run();
  CALLGRIND_DUMP_STATS_AT(label.c_str());
  std::printf("%s: %" PRId64 "\n", label.c_str(), elements);
}

void count_kernels(DType dtype, int64_t rows, int64_t cols) {
  const RmsNormKernels& kernels = rms_norm_kernels();
  const RmsNormBackwardKernels& backward_kernels = rms_norm_backward_kernels();
  KernelProblem p(dtype, dtype, dtype, rows, cols, 8);
  const int64_t elements = rows * cols;
  CpuArgs<RmsNormBackwardArgs> without_residual = p.backward;
  without_residual.grad_residual = nullptr;
  count("scale", dtype, rows, cols, cols,
        [&] { kernels.scale(dtype, dtype, p.weight.data(), 0.0, p.scale.data(), cols); });
  count("forward", dtype, rows, cols, elements, [&] { kernels.forward.rows(p.forward, 0, rows); });
  count("add_forward", dtype, rows, cols, elements, [&] { add_rms_norm_kernels().rows(p.add, 0, rows); });
  count("backward", dtype, rows, cols, elements,
        [&] { backward_kernels.backward.rows(without_residual, 0, p.chunks); });
  count("backward+residual", dtype, rows, cols, elements,
        [&] { backward_kernels.backward.rows(p.backward, 0, p.chunks); });
  count("stats", dtype, rows, cols, elements, [&] { rms_norm_stats_kernels().stats.rows(p.stats, 0, rows); });
  count("from_stats", dtype, rows, cols, elements,
        [&] { rms_norm_stats_kernels().from_stats.rows(p.from_stats, 0, rows); });
  count("backward_stats", dtype, rows, cols, elements,
        [&] { rms_norm_backward_stats_kernels().stats.rows(p.backward_stats, 0, p.chunks); });
  count("backward_from_stats", dtype, rows, cols, elements,
        [&] { rms_norm_backward_stats_kernels().from_stats.rows(p.backward_from_stats, 0, p.chunks); });
  // The gate that is held, and the one that is not.
  for (const bool norm_first : {true, false}) {
    std::vector<char> held(kForwardTile * p.scale.size());
    p.gated.gating = p.gated_backward.gating = {Activation::silu, norm_first};
    p.gated.held = p.gated_backward.held = held.data();
    const std::string name = norm_first ? "norm first" : "gate first";
    count(("gated_forward " + name).c_str(), dtype, rows, cols, elements,
          [&] { gated_rms_norm_kernels().rows(p.gated, 0, rows); });
    count(("gated_backward " + name).c_str(), dtype, rows, cols, elements,
          [&] { gated_rms_norm_backward_kernels().rows(p.gated_backward, 0, p.chunks); });
  }
  count("grad_weight", dtype, rows, cols, p.chunks * cols, [&] {
    backward_kernels.grad_weight(dtype, dtype, p.partials.data(), p.chunks, padded_cols(dtype, cols),
                                 p.grad_weight.data(), cols);
  });
  for (const bool are_neighbours : {false, true}) {
    const PairedColumns paired = {0, cols / 2, are_neighbours};
    p.set_rotation(paired, false, 16);
    p.make_scale(dtype, 0.0, paired);
    const std::string name = are_neighbours ? "neighbours" : "halves";
    count(("rope_forward " + name).c_str(), dtype, rows, cols, elements,
          [&] { rms_norm_rope_kernels().rows(p.rope, 0, rows); });
    count(("rope_backward " + name).c_str(), dtype, rows, cols, elements,
          [&] { rms_norm_rope_backward_kernels().rows(p.rope_backward, 0, p.chunks); });
  }
}

}  // namespace

int main() {
  for (const DType dtype : kDTypes) {
    count_kernels(dtype, 64, 4096);
    count_kernels(dtype, 64, 64);
    count_kernels(dtype, 64, 100);
  }
}
