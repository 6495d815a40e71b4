#include "operators.h"

namespace normops {

void initialize_statics_of_library() { initialize_statics(Operators()); }

}  // namespace normops
