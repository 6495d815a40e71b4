// The part of PyTorch that csrc/cpu/sharing.h needs: memory.
#pragma once
#include <cstddef>
#include <memory>

namespace c10 {

using DataPtr = std::shared_ptr<void>;

struct Allocator {
  DataPtr allocate(size_t bytes) { return std::shared_ptr<char[]>(new char[bytes]); }
};

inline Allocator* GetCPUAllocator() {
  static Allocator allocator;
  return &allocator;
}

}  // namespace c10
