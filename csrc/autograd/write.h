// The part of autograd that stays on in inference mode: counting writes into tensors, by which a backward notices that
// what it saved has changed since.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

#include <type_traits>
#include <utility>

#include "../check.h"

namespace normops {

inline void count_write(Tensor& written) { torch::autograd::impl::bump_version(written); }
template <class Argument>
void count_write(const Argument&) {}

// The kernel of an operator that writes to those of its arguments that are `Tensor&`; `op` returns its handle.
template <auto op, class Signature>
struct CountedWrite;

template <auto op, class Result, class... Arguments>
struct CountedWrite<op, Result(Arguments...)> {
  static Result call(c10::DispatchKeySet keys, Arguments... arguments) {
    const auto run = [&]() -> Result {
      const at::AutoDispatchBelowADInplaceOrView below;
      return op().redispatch(keys & c10::after_ADInplaceOrView_keyset, arguments...);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      (count_write(arguments), ...);
    } else {
      Result result = run();
      (count_write(arguments), ...);
      return result;
    }
  }
};

}  // namespace normops
