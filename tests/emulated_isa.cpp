// Names the instruction set that tests emulate, instead of csrc/cpu/isa.cpp.
#include "isa.h"

namespace normops::cpu {

const char* isa_name(Isa) { return "emulated"; }
Isa current_isa() { return Isa{}; }

}  // namespace normops::cpu
