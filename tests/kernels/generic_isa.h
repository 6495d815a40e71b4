// The CPU kernels without any intrinsics, for csrc/cpu/foreach_isa.h.
#define NORMOPS_ISA generic
#define NORMOPS_VECTOR_BYTES 16
