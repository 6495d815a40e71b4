"""Traces one warp of a CUDA kernel through its machine code (SASS), to compare designs of kernels without a GPU.

``machine_code`` reads what nvcc made for sm_90, ``trace`` follows a thread, ``estimate`` says what share of a copy's
speed a kernel could ask for.

A trace follows the first thread of the first block; its warp does the same as long as no lane branches on its own.
Integers and addresses are computed from the kernel's parameters, so that loops and branches are those of a launch. What
is loaded from memory is 0, and the result of floating-point arithmetic is 1: it takes the usual path of a square root.
Time follows from the control code that the assembler gave each instruction: how many cycles the next one has to stall,
which of six barriers is set when the result is there, and for which barriers it waits.

None of its numbers is a measurement, and none may be quoted as one. Instruction counts are exact for the thread that is
followed. Cycles are those of a warp that is alone, with assumed latencies. An estimate knows nothing of contention:
latencies that grow as DRAM, caches and load/store units fill; hit rates (the caller says what is loaded from where);
misses of the instruction cache; units slower than the scheduler (float64, conversions, MUFU, shuffles, accesses of 16
bytes); warps that wait for one another at barriers; the last wave of blocks; clocks that fall under load. Take it to be
wrong by about 10 points of the copy's speed either way, and use it to rank designs.
"""
