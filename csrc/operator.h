// Handles of operators in the dispatcher.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace normops {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

}  // namespace normops
