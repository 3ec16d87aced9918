// Numbers in float32 or bfloat16, computed with in float32, and the threads that share them, where OpenMP was there.
#pragma once

#include "library.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Bfloat16 {
    uint16_t bits;
};

INLINE float load(const float *at) { return *at; }
INLINE float load(const Bfloat16 *at) {
    const uint32_t bits = uint32_t(at->bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
INLINE void store(float *at, float value) { *at = value; }
INLINE void store(Bfloat16 *at, float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    at->bits = uint16_t(value == value ? rounded : 0x7FC0);
}

// e**x by the Taylor series for |x| <= ln 2 / 2, of a number or a vector of numbers.
#define TAYLOR(x)                                                                                                  \
    (((((((1.0f / 5040 * (x) + 1.0f / 720) * (x) + 1.0f / 120) * (x) + 1.0f / 24) * (x) + 1.0f / 6) * (x) + 0.5f) * \
          (x) + 1.0f) * (x) + 1.0f)

// e**x to about 1e-7, by 2**n times a polynomial (TAYLOR). Beyond 60 it stays
// as it is there, which no sum notices: a product with a denormal number would take a hundred times as long.
INLINE float exponential(float x) {
    x = std::min(std::max(x, -60.0f), 60.0f);
    const float shifted = x * 1.44269504f + 12582912.0f;  // its lowest bits are those of the nearest integer
    const float n = shifted - 12582912.0f;
    const float rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const float sum = TAYLOR(rest);
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return sum * power;
}
INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Integers in the order of their floats: their maximum is found many at a time, without a rule for what NaN compares to.
INLINE int32_t ordered(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
INLINE float unordered(int32_t order) {
    const int32_t bits = order ^ (order >> 31 & 0x7FFFFFFF);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Calls work(begin, end, part) for ranges that make up 0 … count.
template <class Work> void split(int64_t count, int64_t parts, const Work &work) {
    parts = std::max<int64_t>(1, std::min(parts, count));
    if (parts == 1) {
        work(int64_t(0), count, int64_t(0));
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(parts) schedule(static, 1)
#endif
    for (int64_t part = 0; part < parts; part++) work(count * part / parts, count * (part + 1) / parts, part);
}

// The kernel for float32 (kind 0) or bfloat16 (kind 1), as KERNEL##_float and KERNEL##_bfloat.
#define BOTH(kernel, parameters, arguments)                                   \
    FOR_EVERY_CPU void kernel##_float parameters { kernel<float> arguments; } \
    FOR_EVERY_CPU void kernel##_bfloat parameters { kernel<Bfloat16> arguments; }
#define EITHER(kind, kernel, ...) ((kind) ? kernel##_bfloat(__VA_ARGS__) : kernel##_float(__VA_ARGS__))

}  // namespace
