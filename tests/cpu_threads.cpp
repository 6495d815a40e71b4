// Runs what threads share on the CPU with threads that a race detector knows, and compares the results with those of
// one thread. With the argument "racy", two threads do the same work.
#include <array>
#include <cstdio>
#include <string_view>
#include <thread>

#include "isa.h"
#include "kernel_problem.h"
#include "sharing.h"

namespace {

bool is_racy = false;
thread_local int thread_number = 0;

}  // namespace

// In the place of OpenMP's runtime.
extern "C" {

void GOMP_parallel(void (*function)(void*), void* data, unsigned, unsigned) {
  std::vector<std::thread> threads;
  for (int i = 0; i < at::get_num_threads(); i++) {
    threads.emplace_back([=] {
      thread_number = is_racy ? i / 2 : i;
      function(data);
    });
  }
  for (auto& thread : threads) thread.join();
}

int omp_get_num_threads() { return at::get_num_threads(); }
int omp_get_thread_num() { return thread_number; }
}

namespace {

using namespace normops;
using namespace normops::cpu;

constexpr double kWeightOffset = 1;

// The scale that threads have converted together.
struct SharedScale {
  const KernelProblem& problem;
  int64_t own_count() const { return 0; }
  const void* in(Scratch&) const noexcept { return problem.scale.data(); }
};

// The one that each thread converts for itself.
struct OwnScale {
  const KernelProblem& problem;
  int64_t own_count() const { return problem.groups * padded_cols(problem.forward.dtype(), problem.cols); }
  const void* in(Scratch& own) const noexcept {
    problem.write_scale(problem.forward.dtype(), kWeightOffset, own.data());
    return own.data();
  }
};

bool run(DType dtype, int64_t rows, int64_t groups, int64_t cols) {
  constexpr int64_t kRowsPerChunk = 8;
  KernelProblem p(dtype, dtype, dtype, rows, cols, kRowsPerChunk, groups);
  const RmsNormKernels& kernels = rms_norm_kernels();
  const RmsNormBackwardKernels& backward_kernels = rms_norm_backward_kernels();
  const HeldOrder order(dtype, cols);
  parallel_for_columns(groups, order.held_cols(), 1, [&](int64_t group, int64_t begin, int64_t end) noexcept {
    p.write_scale(dtype, kWeightOffset, p.scale.data(), order, group, begin, end);
  });
  run_forward(kernels.forward, p.forward, SharedScale{p});
  const std::vector<char> output = p.output;
  run_forward(add_rms_norm_kernels(), p.add, OwnScale{p});
  run_backward(backward_kernels.backward, p.backward, OwnScale{p});
  parallel_for_columns(groups, order.held_cols(), 1, [&](int64_t group, int64_t begin, int64_t end) noexcept {
    p.sum_grad_weight(dtype, order, group, begin, end);
  });
  const std::vector<char> shared[] = {output, p.output, p.residual_out, p.grad_input, p.grad_weight};
  std::vector<std::vector<char>> gated_results;
  const auto run_gated = [&](auto run) {
    for (const Gating gating : kGatings) {
      p.gated.gating = p.gated_backward.gating = gating;
      run();
      for (const auto* result : {&p.output, &p.grad_input, &p.grad_gate, &p.partials}) gated_results.push_back(*result);
    }
  };
  run_gated([&] {
    run_forward(gated_rms_norm_kernels(), p.gated, OwnScale{p});
    run_backward(gated_rms_norm_backward_kernels(), p.gated_backward, SharedScale{p});
  });

  p.make_scale(dtype, kWeightOffset);
  kernels.forward.rows(p.forward, 0, rows);
  bool is_same = shared[0] == p.output;
  add_rms_norm_kernels().rows(p.add, 0, rows);
  backward_kernels.backward.rows(p.backward, 0, p.chunks * groups);
  p.sum_grad_weight(dtype);
  const std::vector<char>* alone[] = {&p.output, &p.residual_out, &p.grad_input, &p.grad_weight};
  for (int i = 0; i < 4; i++) is_same &= shared[i + 1] == *alone[i];

  run_gated([&] {
    const SharedScale scale{p};
    ThreadsArgs(p.gated, scale, 1).call(0, [&](const auto& args) { gated_rms_norm_kernels().rows(args, 0, rows); });
    ThreadsArgs(p.gated_backward, scale, 1).call(0, [&](const auto& args) {
      gated_rms_norm_backward_kernels().rows(args, 0, p.chunks * groups);
    });
  });
  const auto half = gated_results.begin() + gated_results.size() / 2;
  is_same &= std::equal(gated_results.begin(), half, half);
  return is_same;
}

}  // namespace

int main(int count, char** arguments) {
  is_racy = count > 1 && std::string_view(arguments[1]) == "racy";
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    // Rows shared out, also those of one chunk, and rows shared.
    for (const auto& [rows, groups, cols] : {std::array<int64_t, 3>{37, 1, 1030}, {33, 11, 1030}, {2, 1, 33000}}) {
      if (!run(dtype, rows, groups, cols))
        std::printf("dtype %d, %d rows: not the bits of one thread\n", static_cast<int>(dtype), static_cast<int>(rows));
    }
    if (is_racy) break;  // that shows in any
  }
}
