// libstdc++ asks this variable of glibc 2.32 whether there is one thread alone, to spare atomic operations then. In a
// process with torch there never is. Linked into each library, and hidden in it, this one lets them run with glibc 2.28,
// as torch's own wheels do.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
