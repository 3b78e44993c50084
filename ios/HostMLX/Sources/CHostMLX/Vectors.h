// What functions with vectors of numbers have in common.

#ifndef VECTORS_H
#define VECTORS_H

/// Compiles a function for several CPUs of a kind; the one that runs is chosen when the program starts.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#endif
