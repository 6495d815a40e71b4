// The operators with kernels in Triton.
#pragma once
#include <torch/library.h>

#include <memory>
#include <string>

namespace normops::python {

// As long as it lives they serve a dispatch key, in the place of what was registered before.
class TritonRegistration {
 public:
  explicit TritonRegistration(const std::string& dispatch_key);
  void close() { library_.reset(); }

 private:
  std::unique_ptr<torch::Library> library_;
};

}  // namespace normops::python
