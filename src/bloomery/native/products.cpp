// Products of matrices in bfloat16 with sums in float32, on processors that multiply them by tiles (AMX) or by pairs
// (AVX512-BF16): the three that a linear layer needs in training. Weights stay float32 in memory and are rounded on the
// way; so are no copies kept.
//
//     C[m, n] = Σ_k L[m, k] R[k, n]
//
// The sum of each number is made in an order that depends on k alone, so that threads and rows beside it do not matter.

#include "products_pairs.hpp"
#include "products_tiles.hpp"

#ifdef UNITS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef UNITS

constexpr int64_t PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2): ARCH_REQ_XCOMP_PERM

Units units_here() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1) || !__builtin_cpu_supports("avx512bw")) return none;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return pairs;
    return syscall(SYS_arch_prctl, PERMISSION, TILE_DATA) == 0 ? tiles : pairs;
}

// Threads take rectangles of the result whose sides are as short as they can be.
void product(const Product &p, int64_t threads) {
    const int64_t tall = (p.rows + PANEL - 1) / PANEL, wide = (p.columns + PANEL - 1) / PANEL;
    int64_t down = 1, least = INT64_MAX;
    for (int64_t d = 1; d <= threads; d++) {
        const int64_t sides = (tall + d - 1) / d + (wide * d + threads - 1) / threads;
        if (threads % d == 0 && sides < least) least = sides, down = d;
    }
    const int64_t across = threads / down;
    const auto one = [&](int64_t t) {
        const int64_t row = t / across, column = t % across;
        const int64_t top = tall * row / down * PANEL, bottom = std::min(tall * (row + 1) / down * PANEL, p.rows);
        const int64_t begin = wide * column / across * PANEL, end = std::min(wide * (column + 1) / across * PANEL, p.columns);
        if (top >= bottom || begin >= end) return;
        (p.units == tiles ? part_by_tiles : part_by_pairs)(p, top, bottom, begin, end);
    };
    if (threads == 1) return one(0);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
    for (int64_t t = 0; t < threads; t++) one(t);
}

#else

Units units_here() { return none; }
void product(const Product &, int64_t) { std::abort(); }

#endif

}  // namespace

extern "C" {

// What this processor multiplies with and lets this process use: 0 nothing, 1 pairs, 2 tiles.
int64_t bloomery_units() {
    static const Units found = units_here();
    return found;
}

// `units`: at most those that are here.
// Each side is [free, k] with k contiguous (along_k) or [k, free]; output: see Output.
void bloomery_product(const void *left, int64_t left_stride, int64_t left_wide, int64_t left_along_k,
                      const void *right, int64_t right_stride, int64_t right_wide, int64_t right_along_k, int64_t rows,
                      int64_t columns, int64_t inner, int64_t output, void *into, int64_t stride, const float *bias,
                      int64_t units, int64_t threads) {
    const Side one{left, left_stride, left_wide != 0, left_along_k != 0};
    const Side two{right, right_stride, right_wide != 0, right_along_k != 0};
    product({one, two, rows, columns, inner, Output(output), into, stride, bias, Units(units)}, threads);
}
}
