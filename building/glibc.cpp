// libstdc++ reads this variable of glibc 2.32 to skip atomic operations in single-threaded processes. A process with
// torch is never one. A hidden definition in each library lets it run with glibc 2.28, like torch's wheels.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
