#include "casting.h"

#include <utility>

namespace normops {

// Liger's names for them, after the models that compute so.
static constexpr std::pair<std::string_view, Casting> kCastings[] = {
    {kNoCasting, {.normalized = false, .multiplied = false}},
    {"llama", {.normalized = true, .multiplied = true}},
};

std::optional<Casting> find_casting(std::string_view casting_mode) {
  for (const auto& [name, casting] : kCastings) {
    if (name == casting_mode) return casting;
  }
  return std::nullopt;
}

}  // namespace normops
