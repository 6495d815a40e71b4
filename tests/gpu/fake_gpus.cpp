// Provides CUDA tensors in CPU memory to a torch without CUDA, on the devices of cuda_runtime_stub.cpp: a device guard,
// streams, an allocator, and the ATen operators that normops calls.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

extern "C" {  // defined by the stub
int stub_devices();
int stub_current_device();
void stub_set_device(int device);
void stub_write(const char* line);
}

namespace {

using at::Tensor;

thread_local c10::StreamId current_streams[8];

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return static_type; }
  c10::Device getDevice() const override { return {static_type, static_cast<c10::DeviceIndex>(stub_current_device())}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (device != getDevice()) stub_set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(stub_devices()); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Block {
  void* data;
  size_t bytes;
};

std::mutex mutex;
std::map<void*, size_t> allocated;

// Records the lifetime and the stream of allocations.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = Guard().getDevice();
    if (bytes == 0) return {nullptr, device};
    // Memory belongs to the stream that is current at its allocation, as in torch's own allocator.
    stub_write(("allocate " + std::to_string(bytes) + " on device " + std::to_string(device.index()) + " stream " +
                std::to_string(current_streams[device.index()]))
                   .c_str());
    void* const data = std::aligned_alloc(512, (bytes + 512) / 512 * 512);
    std::memset(data, 0xff, bytes);  // NaN in any dtype, which exposes unwritten elements
    const std::lock_guard lock(mutex);
    allocated[data] = bytes;
    return {data, new Block{data, bytes}, &release, device};
  }
  static void release(void* context) {
    const Block* const block = static_cast<Block*>(context);
    stub_write(("release " + std::to_string(block->bytes)).c_str());
    const std::lock_guard lock(mutex);
    allocated.erase(block->data);
    std::free(block->data);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

Allocator allocator;
const bool is_registered = (c10::SetAllocator(c10::DeviceType::CUDA, &allocator), true);

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &allocator, kKeys, dtype.value(), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kKeys, dtype.value());
}

// Returns a CPU tensor in the same memory.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [keep = tensor](void*) {},
      tensor.options().device(at::kCPU));
}

Tensor& copy(Tensor& target, const Tensor& source, bool) {
  stub_write("copy");
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor& zero(Tensor& target) {
  stub_write("zero");
  on_cpu(target).zero_();
  return target;
}

// Copies the whole storage, so that the strides and the storage offset stay the same.
Tensor to_gpu(const Tensor& tensor, int64_t index) {
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  const int64_t bytes = static_cast<int64_t>(tensor.storage().nbytes());
  const Tensor memory = empty({bytes / tensor.element_size()}, tensor.scalar_type(), {}, device, {}, {});
  if (bytes > 0) std::memcpy(memory.mutable_data_ptr(), tensor.storage().data(), bytes);
  return memory.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("zero_", &zero);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}

TORCH_LIBRARY(fake_gpus, m) {
  m.def("to_gpu(Tensor tensor, int device) -> Tensor");
  m.def("on_cpu(Tensor(a) tensor) -> Tensor(a)");
  m.impl("to_gpu", c10::DispatchKey::CPU, &to_gpu);
  m.impl("on_cpu", c10::DispatchKey::CUDA, &on_cpu);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void fake_set_stream(int device, int64_t stream) { current_streams[device] = stream; }

// Calls use(address, bytes) for each allocation.
void fake_each_block(void (*use)(int64_t, int64_t)) {
  const std::lock_guard lock(mutex);
  for (const auto& [data, bytes] : allocated) use(reinterpret_cast<int64_t>(data), static_cast<int64_t>(bytes));
}
}
#pragma GCC visibility pop
