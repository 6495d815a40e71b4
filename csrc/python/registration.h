// Kernels that are registered while the program runs, and taken back.
#pragma once
#include <torch/library.h>

#include <memory>
#include <string>

namespace normops::python {

// As long as it lives its kernels serve, in the place of what was registered before.
class Registration {
 public:
  explicit Registration(std::unique_ptr<torch::Library> library) : library_(std::move(library)) {}
  void close() { library_.reset(); }

 private:
  std::unique_ptr<torch::Library> library_;
};

// Calls `add` with a library to register in. No warning comes of kernels that take the place of others: that is meant.
template <class Add>
Registration register_kernels(const char* ns, c10::DispatchKey key, const Add& add) {
  struct NoWarning final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  NoWarning handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__);
  add(*library);
  return Registration(std::move(library));
}

// torch's own rms_norm computes with ours, where ours computes the same.
Registration override_torch();

}  // namespace normops::python

namespace normops::triton {

// The operators with kernels in Triton, for a dispatch key.
python::Registration register_operators(const std::string& dispatch_key);

}  // namespace normops::triton
