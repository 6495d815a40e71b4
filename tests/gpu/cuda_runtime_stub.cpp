// Replaces the CUDA runtime under the kernels' launchers, as nvcc compiles them: its GPUs record the calls and pass
// launched kernels to a callback. Functions that normops must not call are missing, so that its library does not link
// with them: synchronization, memory, cudaSetDevice, cudaGetDeviceCount.
//
// It reproduces failures. The first use of a kernel loads it, which invalidates a capture. A busy device gets no
// context. A kernel has no large cluster or shared memory that it did not request.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace {

constexpr int kDevices = 3;  // reported to callers
constexpr int kMostDevices = 256;

// Mirrored by fake_gpus.py.
struct Gpu {
  int major = 9;
  int code = 90;  // architecture of the code that it runs
  int multiprocessors = 132;
  int shared_bytes = 227 << 10;
  int largest_cluster = 16;
  int is_busy = 0;
  int has_context = 0;
  volatile int is_slow = 0;  // 1: queries block until this is 0; 2: a thread is blocked
};

struct Kernel {
  std::string name;
  const char* mangled;
  int shared_bytes = 48 << 10;
  int cluster = 8;
};

std::mutex mutex;
Gpu gpus[kMostDevices];
std::ostringstream calls;
// Returns 0 if the kernel has run.
using Run = int (*)(const char* kernel, const unsigned* grid, const unsigned* block, unsigned cluster,
                    size_t shared_bytes, int starts_early, void** args);
Run run_kernel = nullptr;
std::map<std::pair<const void*, int>, Kernel> loaded;
bool is_capturing, is_capture_valid;
thread_local int current_device;
std::atomic<int> lookups_of_device;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// Names of all kernels, a static of a function: objects register kernels before the globals here are constructed.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> all;
  return all;
}

// Demangles a function without its parameters and namespace: rms_norm_kernel<float, 4, Plain>.
std::string readable(const std::string& mangled) {
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr);
  std::string name = text == nullptr ? mangled : text;
  std::free(text);
  for (const std::string room : {"normops::cuda::", "(anonymous namespace)::", "void "}) {
    for (size_t place; (place = name.find(room)) != std::string::npos;) name.erase(place, room.size());
  }
  return name.substr(0, name.find('('));
}

Gpu& current_gpu() { return gpus[current_device]; }

// Takes time like a driver, so that simultaneous queries of several threads overlap.
void take_time() {
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (current_gpu().is_slow == 1) current_gpu().is_slow = 2;
  } while (current_gpu().is_slow != 0);
}

// Creates a context if there is none.
cudaError_t use_device() {
  if (current_gpu().is_busy) return cudaErrorDevicesUnavailable;
  current_gpu().has_context = 1;
  return cudaSuccess;
}

// Invalidates a capture, unless the thread's capture mode is relaxed.
cudaError_t change_device() {
  if (!is_capturing || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  is_capture_valid = false;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t load(const void* function, Kernel*& kernel) {
  const std::pair key(function, current_device);
  if (!loaded.contains(key)) {
    if (const cudaError_t error = use_device(); error != cudaSuccess) return error;
    if (const cudaError_t error = change_device(); error != cudaSuccess) return error;
    loaded[key].mangled = names().at(function).c_str();
    loaded[key].name = readable(loaded[key].mangled);
    calls << "load " << loaded[key].name << '\n';
  }
  kernel = &loaded[key];
  return cudaSuccess;
}

cudaError_t check_shape(const Kernel& kernel, size_t shared_bytes, int cluster) {
  if (static_cast<int64_t>(shared_bytes) > kernel.shared_bytes) return cudaErrorInvalidValue;
  return cluster > kernel.cluster || cluster > current_gpu().largest_cluster ? cudaErrorInvalidClusterSize
                                                                             : cudaSuccess;
}

struct Attributes {
  int cluster = 1;
  bool starts_early = false;
};

Attributes attributes_of(const cudaLaunchConfig_t& config) {
  Attributes found;
  for (unsigned i = 0; i < config.numAttrs; i++) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      found.cluster = static_cast<int>(attribute.val.clusterDim.y);
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      found.starts_early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Functions for the tests.

Gpu* stub_gpu(int device) { return &gpus[device]; }
int stub_devices() { return kDevices; }
void stub_run_kernels(Run run) { run_kernel = run; }

// State that torch sets: the current device and an active capture.
int stub_current_device() { return current_device; }
int stub_lookups_of_device() { return lookups_of_device; }
void stub_set_device(int device) {
  current_device = device;
  current_gpu().has_context = 1;
}
void stub_begin_capture() { is_capturing = is_capture_valid = true; }
int stub_capture_mode() { return capture_mode; }
int stub_end_capture() { return std::exchange(is_capturing, false) && is_capture_valid; }

void stub_write(const char* line) {
  const std::lock_guard lock(mutex);
  calls << line << '\n';
}

// Returns the calls since the previous query.
const char* stub_calls() {
  static std::string text;
  const std::lock_guard lock(mutex);
  text = calls.str();
  calls.str("");
  return text.c_str();
}

// Functions that nvcc's code calls when the library is loaded and around launches.

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

// Functions that normops calls.

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorDevicesUnavailable:
      return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorInvalidClusterSize:
      return "cluster misconfiguration";
    default:
      return "invalid argument";
  }
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  lookups_of_device++;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
  take_time();
  const std::lock_guard lock(mutex);
  calls << "cudaDeviceGetAttribute " << name << " of " << device << '\n';
  const Gpu& gpu = gpus[device];
  switch (name) {
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = gpu.shared_bytes;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.major;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  take_time();
  const std::lock_guard lock(mutex);
  Kernel* kernel = nullptr;
  if (const cudaError_t error = load(function, kernel); error != cudaSuccess) return error;
  calls << "cudaFuncGetAttributes " << kernel->name << '\n';
  *attributes = {};
  attributes->ptxVersion = current_gpu().code;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute name, int value) {
  const std::lock_guard lock(mutex);
  Kernel* kernel = nullptr;
  if (const cudaError_t error = load(function, kernel); error != cudaSuccess) return error;
  calls << "cudaFuncSetAttribute " << kernel->name << ' ';
  if (name == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    calls << "shared " << value << '\n';
    if (value > current_gpu().shared_bytes) return cudaErrorInvalidValue;
    kernel->shared_bytes = value;
  } else {
    calls << "cluster\n";
    kernel->cluster = 16;
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int, size_t bytes,
                                                                   unsigned) {
  const std::lock_guard lock(mutex);
  Kernel* kernel = nullptr;
  if (const cudaError_t error = load(function, kernel); error != cudaSuccess) return error;
  calls << "occupancy " << kernel->name << '\n';
  *blocks = 1;
  return check_shape(*kernel, bytes, 1);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, bytes, 0);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* config) {
  const std::lock_guard lock(mutex);
  Kernel* kernel = nullptr;
  if (const cudaError_t error = load(function, kernel); error != cudaSuccess) return error;
  const int cluster = attributes_of(*config).cluster;
  calls << "occupancy " << kernel->name << " cluster " << cluster << '\n';
  *clusters = current_gpu().multiprocessors / cluster;
  return check_shape(*kernel, config->dynamicSmemBytes, cluster);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  const std::lock_guard lock(mutex);
  Kernel* kernel = nullptr;
  if (const cudaError_t error = load(function, kernel); error != cudaSuccess) return error;
  const auto [cluster, starts_early] = attributes_of(*config);
  calls << "launch " << kernel->name << " on device " << current_device << " stream "
        << reinterpret_cast<uintptr_t>(config->stream) << " cluster " << cluster << " shared "
        << config->dynamicSmemBytes << (starts_early ? " early" : "") << '\n';
  if (const cudaError_t error = check_shape(*kernel, config->dynamicSmemBytes, cluster); error != cudaSuccess) {
    return error;
  }
  if (run_kernel == nullptr) return cudaSuccess;
  const unsigned grid[] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  const unsigned block[] = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  const int error = run_kernel(kernel->mangled, grid, block, static_cast<unsigned>(cluster), config->dynamicSmemBytes,
                               starts_early, args);
  return error == 0 ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // extern "C"
#pragma GCC visibility pop
