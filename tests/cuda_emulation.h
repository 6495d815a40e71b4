// Runs CUDA kernels on the CPU: what csrc/cuda/platform.cuh needs in place of the CUDA runtime. Each CUDA thread is a
// fiber. Clusters of blocks run one after another, the blocks of one in turns. Who runs when between two barriers is
// drawn at random, and so is when a number arrives that one block sends to another, so that a missing barrier shows as
// a wrong result; a barrier or shuffle that not all threads reach makes launch() throw.
#pragma once
#include <link.h>
#include <setjmp.h>
#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __launch_bounds__(...)
// As one block runs at a time, what it shares is static. That it is thread-local puts it together in memory, where it
// can be found, and exchanged for another block's: GCC has no section for the variables of a template.
#define __shared__ static thread_local

// Of the thread that runs.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace normops::cuda::emulation {

constexpr unsigned kLanes = 32;
constexpr int64_t kMaxThreads = 1024;

// The scheduler, or the fiber of a thread, while another one runs.
struct Context {
  jmp_buf registers;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // the address sanitizer's
};

// The address sanitizer has to be told of every change of stack.
inline void before_switch([[maybe_unused]] Context& left, [[maybe_unused]] const Context& entered) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&left.fake_stack, entered.stack_bottom, entered.stack_bytes);
#endif
}

inline void after_switch([[maybe_unused]] const Context& entered, [[maybe_unused]] Context& left) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(entered.fake_stack, &left.stack_bottom, &left.stack_bytes);
#endif
}

enum class Stop { kStart, kShuffle, kBarrier, kClusterBarrier, kArrivals, kExit };

struct Thread {
  Context context;
  std::unique_ptr<char[]> stack;  // null before the fiber is made
  uint3 index, block;
  Stop stop;
  std::source_location where;
  // Of a wait for arrivals: where they are counted, and which time it is.
  ptrdiff_t arrivals;
  unsigned time;
  // Of a shuffle:
  unsigned mask;
  unsigned distance;
  uint64_t bits;
};

struct Block {
  uint3 index;
  std::vector<Thread> threads{kMaxThreads};
  // While others of its cluster run:
  std::vector<char> static_shared;
  std::vector<char> dynamic_shared;
};

// What the shared memory of a block has where class Arrivals is.
struct ArrivalCount {
  int64_t missing;  // bytes; less than 0 if some came before they were expected
  int32_t is_expected;
  uint32_t times;  // that are over

  void end_if_all_came() {
    if (is_expected == 0 || missing != 0) return;
    is_expected = 0;
    times++;
  }
};

// What a block has sent, until it arrives.
struct Message {
  Block* to;
  ptrdiff_t place, arrivals;  // in static shared memory
  std::array<char, 8> bytes;
  unsigned size;
};

// All thread-local memory of this program or library.
inline std::span<char> thread_local_memory() {
  static thread_local char one_byte_of_it = 0;
  struct Search {
    char* byte;
    std::span<char> found;
  } search = {&one_byte_of_it, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        for (int i = 0; i < module->dlpi_phnum; i++) {
          if (module->dlpi_phdr[i].p_type != PT_TLS) continue;
          const std::span memory(static_cast<char*>(module->dlpi_tls_data), module->dlpi_phdr[i].p_memsz);
          if (search.byte >= memory.data() && search.byte < memory.data() + memory.size()) search.found = memory;
        }
        return 0;
      },
      &search);
  return search.found;
}

class Machine {
 public:
  void seed(uint64_t value) { random_.seed(value); }

  void launch(const std::function<void()>& body, dim3 grid, dim3 block, int64_t shared_bytes) {
    // What the CUDA runtime would refuse on every device.
    constexpr int64_t kMaxSharedBytes = 227 << 10;
    const int64_t threads = int64_t{block.x} * block.y * block.z, blocks = int64_t{grid.x} * grid.y * grid.z;
    if (threads < 1 || threads > kMaxThreads || blocks < 1 || shared_bytes < 0 || shared_bytes > kMaxSharedBytes) {
      throw std::runtime_error("CUDA emulation: cannot launch " + std::to_string(blocks) + " blocks of " +
                               std::to_string(threads) + " threads with " + std::to_string(shared_bytes) +
                               " bytes of shared memory");
    }
    constexpr unsigned kMostBlocksOfCluster = 16;
    if (grid.y > kMostBlocksOfCluster || grid.z != 1) {
      throw std::runtime_error("CUDA emulation: cannot launch clusters of " + std::to_string(grid.y) + " blocks");
    }
    body_ = &body;
    static_shared_ = thread_local_memory();
    gridDim = grid;
    blockDim = block;
    count_ = threads;
    if (blocks_.size() < grid.y) blocks_.resize(grid.y);
    const std::span cluster(blocks_.data(), grid.y);
    // Allocated for each launch, so that the address sanitizer knows its size.
    dynamic_shared_.reset(new char[shared_bytes]);
    shared_bytes_ = shared_bytes;
    for (Block& of_cluster : cluster) {
      for (unsigned i = 0; i < threads; i++) {
        of_cluster.threads[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
      }
    }

    std::vector<unsigned> order(grid.x);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random_);
    for (const unsigned number : order) {
      for (unsigned rank = 0; rank < grid.y; rank++) cluster[rank].index = {number, rank, 0};
      try {
        run_cluster(cluster);
      } catch (...) {
        blocks_.clear();  // their threads are somewhere inside the kernel
        throw;
      }
    }
  }

  void* dynamic_shared() const { return dynamic_shared_.get(); }

  // To the block `rank` of the cluster, where the running one has `place` and `arrivals`, of static shared memory.
  void send(unsigned rank, const void* place, const void* arrivals, const void* bytes, unsigned size) {
    Message message = {&blocks_.at(rank), offset_of(place), offset_of(arrivals), {}, size};
    std::memcpy(message.bytes.data(), bytes, size);
    messages_.push_back(message);
  }

  void wait_for_arrivals(const void* arrivals, unsigned time, const std::source_location& where) {
    running_->arrivals = offset_of(arrivals);
    running_->time = time;
    stop(Stop::kArrivals, where);
  }

  // The running thread waits there, until the scheduler resumes it.
  void stop(Stop stop, const std::source_location& where) {
    running_->stop = stop;
    running_->where = where;
    jump(running_->context, scheduler_);
  }

  uint64_t shuffle(unsigned mask, uint64_t bits, unsigned distance, const std::source_location& where) {
    running_->mask = mask;
    running_->bits = bits;
    running_->distance = distance;
    stop(Stop::kShuffle, where);
    return running_->bits;
  }

 private:
  // The blocks of a cluster, each to its next barrier of all of them, in any order.
  void run_cluster(std::span<Block> cluster) {
    std::vector<unsigned> order(cluster.size());
    std::iota(order.begin(), order.end(), 0u);
    for (Block& block : cluster) {
      for (unsigned i = 0; i < count_; i++) block.threads[i].stop = Stop::kStart;
      // What a block shares is garbage at first, and NaN if it is read.
      block.static_shared.assign(static_shared_.size(), -1);
      block.dynamic_shared.assign(shared_bytes_, -1);
    }
    messages_.clear();
    const auto is_at = [](Stop stop) { return [=](const Block& block) { return block.threads[0].stop == stop; }; };
    while (!std::ranges::all_of(cluster, is_at(Stop::kExit))) {
      std::shuffle(order.begin(), order.end(), random_);
      // Some of what is under way arrives, and all of it if nobody can go on without.
      const auto ready = [&](unsigned rank) { return can_go_on(cluster[rank]); };
      deliver(2);
      if (std::ranges::none_of(order, ready)) deliver(1);
      if (const auto next = std::ranges::find_if(order, ready); next != order.end()) {
        enter(cluster[*next]);
        run_block();
        leave();
        continue;
      }
      const auto waiting = std::ranges::find_if(cluster, is_at(Stop::kArrivals));
      if (waiting != cluster.end()) {
        throw std::runtime_error("CUDA emulation: " + describe(waiting->threads[0]) + " which nobody sends");
      }
      // All are at a barrier of all of them.
      for (Block& block : cluster) expect_same_stop(cluster[0].threads[0], block.threads[0]);
      for (Block& block : cluster) block.threads[0].stop = Stop::kStart;
    }
    if (!messages_.empty())
      throw std::runtime_error("CUDA emulation: a block has ended before all arrived that was sent");
  }

  static ArrivalCount& count_in(Block& block, ptrdiff_t arrivals) {
    auto& count = reinterpret_cast<ArrivalCount&>(block.static_shared.at(arrivals));
    if (count.is_expected < 0) throw std::runtime_error("CUDA emulation: arrivals are used before they begin");
    return count;
  }

  bool can_go_on(Block& block) const {
    const Thread& thread = block.threads[0];
    // As a GPU, which knows whether a time is even or odd.
    if (thread.stop == Stop::kArrivals) return (count_in(block, thread.arrivals).times - thread.time) % 2 == 1;
    return thread.stop == Stop::kStart;
  }

  // One in `every` of what has been sent arrives, in any order.
  void deliver(unsigned every) {
    std::shuffle(messages_.begin(), messages_.end(), random_);
    std::erase_if(messages_, [&](const Message& message) {
      if (random_() % every != 0) return false;
      if (message.to->threads[0].stop == Stop::kExit) {
        throw std::runtime_error("CUDA emulation: a block has ended before all arrived that was sent");
      }
      ArrivalCount& count = count_in(*message.to, message.arrivals);
      std::memcpy(&message.to->static_shared.at(message.place), message.bytes.data(), message.size);
      count.missing -= message.size;
      count.end_if_all_came();
      return true;
    });
  }

  ptrdiff_t offset_of(const void* address) const { return static_cast<const char*>(address) - static_shared_.data(); }

  void enter(Block& block) {
    block_ = &block;
    blockIdx = block.index;
    std::ranges::copy(block.static_shared, static_shared_.data());
    std::ranges::copy(block.dynamic_shared, dynamic_shared_.get());
  }

  void leave() {
    std::ranges::copy(static_shared_, block_->static_shared.data());
    std::copy_n(dynamic_shared_.get(), shared_bytes_, block_->dynamic_shared.data());
  }

  void run_block() {
    do {
      std::vector<unsigned> warps((count_ + kLanes - 1) / kLanes);
      std::iota(warps.begin(), warps.end(), 0u);
      for (size_t at = random_() % warps.size(); !warps.empty();) {
        // A warp mostly goes on, so that some get far ahead of others.
        if (random_() % 16 == 0) at = random_() % warps.size();
        if (run_warp(warps[at])) continue;
        warps.erase(warps.begin() + at);
        if (!warps.empty()) at = random_() % warps.size();
      }
      expect_same_stop(0, count_);
    } while (block_->threads[0].stop == Stop::kBarrier);
  }

  // Resumes the warp's threads until each is at its next stop; false if that is not a shuffle.
  bool run_warp(unsigned warp) {
    const unsigned first = warp * kLanes, lanes = std::min(kLanes, count_ - first);
    std::array<unsigned, kLanes> order;
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.begin() + lanes, random_);
    for (unsigned i = 0; i < lanes; i++) resume(block_->threads[first + order[i]]);

    Thread* const thread = &block_->threads[first];
    if (std::none_of(thread, thread + lanes, [](const Thread& t) { return t.stop == Stop::kShuffle; })) return false;
    expect_same_stop(first, first + lanes);
    std::array<uint64_t, kLanes> bits;
    for (unsigned lane = 0; lane < lanes; lane++) {
      const unsigned source = lane ^ thread[lane].distance;
      if (thread[lane].mask != 0xffffffffu || source >= lanes) {
        throw std::runtime_error("CUDA emulation: " + describe(thread[lane]) + " which is not among all 32 lanes");
      }
      bits[lane] = thread[source].bits;
    }
    for (unsigned lane = 0; lane < lanes; lane++) thread[lane].bits = bits[lane];
    return true;
  }

  void expect_same_stop(unsigned begin, unsigned end) const {
    for (unsigned i = begin + 1; i < end; i++) expect_same_stop(block_->threads[begin], block_->threads[i]);
  }

  static void expect_same_stop(const Thread& a, const Thread& b) {
    const bool same_place = a.where.line() == b.where.line() && a.where.column() == b.where.column() &&
                            std::strcmp(a.where.file_name(), b.where.file_name()) == 0;
    const bool same_distance = a.stop != Stop::kShuffle || a.distance == b.distance;
    const bool same_arrivals = a.stop != Stop::kArrivals || (a.arrivals == b.arrivals && a.time == b.time);
    if (a.stop == b.stop && same_place && same_distance && same_arrivals) return;
    throw std::runtime_error("CUDA emulation: " + describe(a) + " but " + describe(b));
  }

  static std::string describe(const Thread& thread) {
    const auto triple = [](const uint3& index) {
      return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
    };
    const std::string name = "thread " + triple(thread.index) + " of block " + triple(thread.block);
    if (thread.stop == Stop::kExit) return name + " has ended";
    const std::string place = std::string(thread.where.file_name()) + ":" + std::to_string(thread.where.line());
    if (thread.stop == Stop::kBarrier) return name + " is at the barrier in " + place;
    if (thread.stop == Stop::kClusterBarrier) return name + " is at the barrier of the cluster in " + place;
    if (thread.stop == Stop::kArrivals) return name + " waits for arrivals in " + place;
    return name + " is at the shuffle over " + std::to_string(thread.distance) + " in " + place;
  }

  void resume(Thread& thread) {
    running_ = &thread;
    threadIdx = thread.index;
    thread.block = blockIdx;
    if (thread.stack != nullptr) {
      jump(scheduler_, thread.context);
    } else {
      start(thread);
    }
  }

  // Not swapcontext, which calls the operating system for the signal mask, and would take most of the time.
  [[gnu::noinline]] void jump(Context& from, Context& to) {
    before_switch(from, to);
    if (_setjmp(from.registers) == 0) _longjmp(to.registers, 1);
    after_switch(from, to);
  }

  [[gnu::noinline]] void start(Thread& thread) {
    constexpr size_t kStackBytes = 64 << 10;
    thread.stack.reset(new char[kStackBytes]);
    thread.context.stack_bottom = thread.stack.get();
    // Not the same for all: the tops of all stacks would lie in the same few lines of the cache.
    thread.context.stack_bytes = kStackBytes - (&thread - block_->threads.data()) % 64 * 64;
    ucontext_t fiber;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = thread.stack.get();
    fiber.uc_stack.ss_size = thread.context.stack_bytes;
    makecontext(&fiber, &Machine::run_thread, 0);
    before_switch(scheduler_, thread.context);
    if (_setjmp(scheduler_.registers) == 0) setcontext(&fiber);
    after_switch(scheduler_, thread.context);
  }

  // A fiber stays, and runs the thread of its number in one block after another.
  static void run_thread();

  std::mt19937_64 random_;
  const std::function<void()>* body_ = nullptr;
  std::span<char> static_shared_;
  int64_t shared_bytes_ = 0;
  std::unique_ptr<char[]> dynamic_shared_;
  std::vector<Block> blocks_;
  Block* block_ = nullptr;  // that runs
  std::vector<Message> messages_;
  unsigned count_ = 0;  // threads of a block
  Context scheduler_;
  Thread* running_ = nullptr;
};

inline Machine machine;

inline void Machine::run_thread() {
  after_switch(machine.running_->context, machine.scheduler_);
  while (true) {
    (*machine.body_)();
    machine.stop(Stop::kExit, std::source_location());
  }
}

// Throws std::runtime_error if not all threads reach a barrier or shuffle.
inline void launch(const std::function<void()>& body, dim3 grid, dim3 block, int64_t shared_bytes) {
  machine.launch(body, grid, block, shared_bytes);
}

inline void* dynamic_shared() { return machine.dynamic_shared(); }

}  // namespace normops::cuda::emulation

// Of all threads of a cluster.
inline void cluster_barrier(const std::source_location where = std::source_location::current()) {
  normops::cuda::emulation::machine.stop(normops::cuda::emulation::Stop::kClusterBarrier, where);
}

namespace normops::cuda {

// As that of csrc/cuda/cluster.cuh.
class Arrivals {
 public:
  void begin() { count_ = {}; }

  void expect(unsigned bytes) {
    count_.missing += bytes;
    count_.is_expected = 1;
    count_.end_if_all_came();
  }

  void wait(unsigned time, const std::source_location where = std::source_location::current()) {
    emulation::machine.wait_for_arrivals(this, time, where);
  }

  template <class Bits>
  void send(unsigned rank, Bits* place, Bits bits) const {
    emulation::machine.send(rank, place, this, &bits, sizeof bits);
  }

 private:
  emulation::ArrivalCount count_;
};

}  // namespace normops::cuda

inline void __syncthreads(const std::source_location where = std::source_location::current()) {
  using namespace normops::cuda::emulation;
  machine.stop(Stop::kBarrier, where);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned distance,
                  const std::source_location where = std::source_location::current()) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = normops::cuda::emulation::machine.shuffle(mask, bits, distance, where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

// Rounded twice, but no root is closer to the middle between two floats than 2^-29 of their distance.
inline float __frsqrt_rn(float value) { return static_cast<float>(1 / std::sqrt(static_cast<long double>(value))); }
