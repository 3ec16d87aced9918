// What every library of this folder has: versions of hot functions for several processors, and what it was built from.
#pragma once

#include <cstddef>
#include <cstdint>

// Compiled for several levels of the processor; the loader takes the best that this one has.
#if defined(PLAIN) || !defined(__x86_64__) || !defined(__GLIBC__)
#define FOR_EVERY_CPU
#elif defined(__clang__) || __GNUC__ < 12
#define FOR_EVERY_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

extern "C" const char *bloomery_sources() { return SOURCES; }

// "avx512", "avx2" or "baseline": which versions run here.
extern "C" const char *bloomery_level() {
#if defined(PLAIN) || !defined(__x86_64__) || !defined(__GLIBC__)
    return "baseline";
#else
    __builtin_cpu_init();
#if !defined(__clang__) && __GNUC__ >= 12
    if (__builtin_cpu_supports("x86-64-v4")) return "avx512";
    return __builtin_cpu_supports("x86-64-v3") ? "avx2" : "baseline";
#else
    return __builtin_cpu_supports("avx2") ? "avx2" : "baseline";
#endif
#endif
}
