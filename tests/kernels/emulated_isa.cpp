// Replaces csrc/cpu/isa.cpp for an emulated instruction set.
#include "isa.h"

namespace normops::cpu {

const char* isa_name(Isa) { return "emulated"; }
Isa current_isa() { return Isa{}; }

}  // namespace normops::cpu
