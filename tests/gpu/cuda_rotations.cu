// Computes the kernel arguments of rope.cuh for cos and sin in two allocations. An address sanitizer that checks pairs
// of pointers reports a subtraction of their addresses.
#include <cstdio>
#include <memory>

#include "rope.cuh"

int main() {
  using namespace normops;
  const auto cos = std::make_unique<float[]>(8), sin = std::make_unique<float[]>(8);
  const RowsArg of_cos = {cos.get(), DType::float32, {}}, of_sin = {sin.get(), DType::float32, {}};
  KernelArgs args = {};
  args.cols = 8;
  args.rotation = {false, false, 0, 4};
  args.tensors[kCos] = &of_cos;
  args.tensors[kSin] = &of_sin;
  const auto rotation = cuda::rotation_of<float>(args);
  const auto address = reinterpret_cast<intptr_t>(rotation.cos.bytes.data) + rotation.sin;
  if (address == reinterpret_cast<intptr_t>(sin.get())) return 0;
  std::puts("expected the address of sin");
  return 1;
}
