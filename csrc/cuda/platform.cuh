// CUDA functions of the kernels and their launchers.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NORMOPS_CLUSTERS 1
#else
#define NORMOPS_CLUSTERS 0
#endif

namespace normops::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Returns the dynamic shared memory of a block.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ uint4 normops_dynamic_shared[];
  return reinterpret_cast<T*>(normops_dynamic_shared);
}

// The compiler moves no memory access across this. Otherwise, it would load ahead and run out of registers.
__device__ inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// The assembler does not move memory accesses across this either. It costs an instruction. All threads of a warp must
// call it.
__device__ inline void keep_order_of_warp() { __syncwarp(); }

// Hides from the compiler how an integer was computed. Otherwise, it would keep values derived from it in registers, or
// recompute the integer at each use.
template <class Integer>
__device__ void make_opaque(Integer& number) {
  if constexpr (sizeof(Integer) == 4) {
    asm volatile("" : "+r"(number));
  } else {
    asm volatile("" : "+l"(number));
  }
}

// The same for a pointer to global memory.
template <class T>
__device__ void make_opaque(T*& pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
}

// 1 / number, rounded to the nearest, for numbers whose reciprocals are normal. A division would have a branch for the
// others.
__device__ inline float reciprocal(float number) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(number));
  return __fmaf_rn(__fmaf_rn(-number, estimate, 1), estimate, estimate);
}

__device__ inline double reciprocal(double number) { return 1 / number; }

struct LaunchShape {
  dim3 grid;  // clusters, blocks of a cluster
  dim3 block;
  int64_t shared_bytes = 0;
  bool pdl = false;  // programmatic dependent launch: starts while the previous kernel of the stream ends, see pdl_wait
};

// Each kernel calls this before it accesses memory, with LaunchShape::pdl. Only a kernel with pdl lets the next kernel
// of the stream start early: without pdl, the next kernel may be one that does not wait. The branch is a PTX predicate,
// as a C++ branch costs the kernels with rotations one more register.
__device__ inline void pdl_wait(bool pdl) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred early;\n\tsetp.ne.u32 early, %0, 0;\n\tgriddepcontrol.wait;\n\t"
      "@early griddepcontrol.launch_dependents;\n\t}" ::"r"(static_cast<unsigned>(pdl))
      : "memory");
#endif
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("normops: CUDA: ") + cudaGetErrorString(error));
}

inline int current_device_index() {
  int device = 0;
  check(cudaGetDevice(&device));
  return device;
}

// Lets the thread, during its lifetime, load code and query device properties while this or another thread captures a
// graph. Neither belongs to the graph, but would otherwise invalidate the capture.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCaptureScope() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // after the exchange, the thread's previous mode
};

// Computes a value once for each key, in the first thread that needs it. If that fails, the next call tries again.
// Known keys are looked up without a lock, in a list, as there are few.
template <class Key, class Value>
class PerKeyCache {
 public:
  template <class Find>
  Value& operator()(const Key& key, Find find) {
    if (Entry* const entry = look_up(key)) return entry->value;
    const std::lock_guard lock(mutex_);
    if (Entry* const entry = look_up(key)) return entry->value;
    const RelaxedCaptureScope may_load;
    Entry* const entry = new Entry{key, find(), newest_.load(std::memory_order_relaxed)};
    newest_.store(entry, std::memory_order_release);
    return entry->value;
  }

 private:
  struct Entry {
    const Key key;
    Value value;
    Entry* const next;
  };

  Entry* look_up(const Key& key) const {
    Entry* entry = newest_.load(std::memory_order_acquire);
    while (entry != nullptr && entry->key != key) entry = entry->next;
    return entry;
  }

  std::mutex mutex_;
  std::atomic<Entry*> newest_ = nullptr;  // entries are never freed, as other threads may read them
};

// A limit of a kernel on a device, which can be raised.
template <class Number>
class Limit {
 public:
  explicit Limit(Number granted) : granted_(granted) {}

  // Calls raise() if less than `wanted` was granted so far.
  template <class Raise>
  void ask_for(Number wanted, Raise raise) {
    if (wanted <= granted_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    if (wanted <= granted_.load(std::memory_order_relaxed)) return;
    const RelaxedCaptureScope may_load;
    raise();
    granted_.store(wanted, std::memory_order_release);
  }

 private:
  std::mutex mutex_;
  std::atomic<Number> granted_;
};

// Called before a kernel runs on the current device. The first call loads the kernel, as the first launch would
// otherwise do that, perhaps in a capture. Requests larger clusters and more shared memory than the default if the
// shape needs them and they have not been granted yet.
template <class... Params>
void prepare(void (*kernel)(Params...), const LaunchShape& shape) {
  struct Granted {
    Limit<int64_t> shared_bytes = Limit<int64_t>(48 << 10);
    Limit<unsigned> blocks_of_cluster = Limit<unsigned>(8);
  };
  static PerKeyCache<std::pair<void (*)(Params...), int>, Granted> prepared;
  Granted& granted = prepared({kernel, current_device_index()}, [&] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel));  // loads the kernel
    return Granted();
  });
  granted.blocks_of_cluster.ask_for(
      shape.grid.y, [&] { check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)); });
  granted.shared_bytes.ask_for(shape.shared_bytes, [&] {
    const int bytes = static_cast<int>(shape.shared_bytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  });
}

// Calls use(config). The config must not outlive the call, as it points to local variables.
template <class... Params, class Use>
void with_launch_config(void (*kernel)(Params...), const LaunchShape& shape, Use use) {
  prepare(kernel, shape);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.grid.y > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {1, shape.grid.y, 1};
  }
  if (shape.pdl) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  use(config);
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, void* stream, const Args&... args) {
  with_launch_config(kernel, shape, [&](cudaLaunchConfig_t& config) {
    config.stream = static_cast<cudaStream_t>(stream);
    check(cudaLaunchKernelEx(&config, kernel, args...));
  });
}

// Returns the number of clusters of this shape (blocks, if a cluster has one) that the current device runs at once.
template <class... Params>
int64_t clusters_at_once(void (*kernel)(Params...), const LaunchShape& shape, int multiprocessors) {
  int64_t count = 0;
  with_launch_config(kernel, shape, [&](cudaLaunchConfig_t& config) {
    int found = 0;
    if (shape.grid.y > 1) {
      check(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
      count = found;
    } else {
      const int threads = static_cast<int>(shape.block.x * shape.block.y);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, shape.shared_bytes));
      count = static_cast<int64_t>(found) * multiprocessors;
    }
  });
  return count;
}

}  // namespace normops::cuda
