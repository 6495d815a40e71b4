// Kernels that are registered and unregistered at run time.
#pragma once
#include <torch/library.h>

#include <memory>
#include <string>

namespace normops::python {

// Overrides the registered kernels for its lifetime.
class Registration {
 public:
  explicit Registration(std::unique_ptr<torch::Library> library) : library_(std::move(library)) {}
  void close() { library_.reset(); }

 private:
  std::unique_ptr<torch::Library> library_;
};

// Calls `add` with a library to register in. Suppresses the warnings about kernels that replace others.
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

// Makes torch's rms_norm call normops::rms_norm where both compute the same.
Registration override_torch();

}  // namespace normops::python

namespace normops::triton {

// Registers the operators with Triton kernels for a dispatch key: all of them, or those over channels.
python::Registration register_operators(const std::string& dispatch_key);
python::Registration register_channel_operators(const std::string& dispatch_key);

}  // namespace normops::triton
