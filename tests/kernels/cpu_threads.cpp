// Runs the CPU operators' multi-threaded code with std::thread, which race detectors support, and compares the results
// with those of one thread. With the argument "racy", two threads do the same work.
#include <array>
#include <cstdio>
#include <string_view>
#include <thread>

#include "isa.h"
#include "kernel_problem.h"
#include "parameters.h"

namespace {

bool is_racy = false;
thread_local int thread_number = 0;

}  // namespace

// Replaces OpenMP's runtime.
extern "C" {

void GOMP_parallel(void (*function)(void*), void* data, unsigned, unsigned) {
  std::vector<std::thread> threads;
  for (int i = 0; i < at::get_num_threads(); i++) {
    threads.emplace_back([=] {
      at::is_in_region = true;
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

// All results of a problem.
std::vector<std::vector<char>> results(KernelProblem<std::vector<char>>& p) {
  std::vector<std::vector<char>> found;
  for (auto* output : {&p.output, &p.residual_out, &p.grad_input, &p.grad_gate, &p.grad_weight}) {
    std::fill(output->begin(), output->end(), 0);
  }
  const int64_t groups = p.groups;
  const auto forward = [&](ForwardKernel kernel, const CpuArgs& args) {
    run_forward(kernel, args, Scale(args, groups));
    found.insert(found.end(), {p.output, p.residual_out});
  };
  const auto backward = [&](BackwardKernel kernel, CpuArgs args, bool sums_rows) {
    args.tensors[kGradWeight] = sums_rows ? &p.of_grad_weight : nullptr;
    run_backward(kernel, args);
    found.insert(found.end(), {p.grad_input, p.grad_gate, p.grad_weight});
  };
  forward(rms_norm_kernels().forward, p.forward);
  forward(add_rms_norm_kernel(), p.add);
  for (const bool sums_rows : {true, false}) {
    backward(rms_norm_backward_kernels().backward, p.backward, sums_rows);
    for (const Gating gating : kGatings) {
      p.gated.gating = p.gated_backward.gating = gating;
      forward(gated_rms_norm_kernel(), p.gated);
      backward(gated_rms_norm_backward_kernel(), p.gated_backward, sums_rows);
    }
  }
  return found;
}

bool run(DType dtype, int64_t rows, int64_t groups, int64_t cols) {
  KernelProblem p(random_numbers, dtype, dtype, dtype, rows, cols, rows, groups);
  p.each([](CpuArgs& args) { args.weight.offset = 1; });
  const auto shared = results(p);
  const int threads = std::exchange(at::threads, 1);
  const auto alone = results(p);
  at::threads = threads;
  return shared == alone;
}

}  // namespace

int main(int count, char** arguments) {
  is_racy = count > 1 && std::string_view(arguments[1]) == "racy";
  std::printf("%s\n", isa_name(current_isa()));
  for (const DType dtype : kDTypes) {
    // Rows divided among threads, with one group, several groups, and few rows per group; then columns of parameters.
    for (const auto& [rows, groups, cols] :
         {std::array<int64_t, 3>{137, 1, 1030}, {330, 11, 130}, {66, 33, 1030}, {2, 1, 33000}, {18, 2, 16400}}) {
      if (!run(dtype, rows, groups, cols))
        std::printf("dtype %d, %d rows: not the bits of one thread\n", static_cast<int>(dtype), static_cast<int>(rows));
    }
    if (is_racy) break;  // every dtype shows the race
  }
}
