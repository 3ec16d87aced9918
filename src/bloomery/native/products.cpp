// Products of matrices in bfloat16 with sums in float32, on processors that multiply them by tiles (AMX) or by pairs
// (AVX512-BF16): the three that a linear layer needs in training. Weights stay float32 in memory and are rounded on the
// way; so are no copies kept.
//
//     C[m, n] = Σ_k L[m, k] R[k, n]
//
// The sum of each number is made in an order that depends on k alone, so that threads and rows beside it do not matter.

#include "attention_pairs.hpp"
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

void attention(const Attention &a, void *room, int64_t each, bool grads, int64_t threads) {
    split(a.batch * a.kv_heads, threads, [&](int64_t begin, int64_t end, int64_t part) {
        for (int64_t task = begin; task < end; task++)
            (grads ? attend_back : attend)(a, task, {(char *)room + part * each});
    });
}

#else

Units units_here() { return none; }
void product(const Product &, int64_t) { std::abort(); }
int64_t attention_room(int64_t, int64_t, int64_t, bool) { return 0; }
void attention(const Attention &, void *, int64_t, bool, int64_t) { std::abort(); }

#endif

// strides: of batch, head and token of one tensor after the other.
Heads heads(const void *numbers, const int64_t *strides, int64_t n) {
    return {(uint16_t *)numbers, strides[3 * n], strides[3 * n + 1], strides[3 * n + 2]};
}

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

// Bytes of room that each thread needs in attention by pairs, or for its gradients.
int64_t bloomery_attention_room(int64_t tokens, int64_t width, int64_t value_width, int64_t grads) {
    return attention_room(tokens, width, value_width, grads != 0);
}

// q [batch, heads, tokens, width], k, v and y like it, each with its own strides (3 of each, in numbers, those of the
// width are 1); widths are multiples of 32. first [batch, tokens]: the first key that a query sees. rest, as y, and
// totals [batch, heads, tokens, 2] are what the gradients need again; rest may be null where there will be none. room:
// `each` bytes for a thread, on lines of the cache.
void bloomery_attention(const void *q, const void *k, const void *v, void *y, void *rest, const int64_t *strides,
                        const int64_t *first, float *totals, int64_t batch, int64_t heads_of_queries, int64_t kv_heads,
                        int64_t tokens, int64_t width, int64_t value_width, float scale, void *room, int64_t each,
                        int64_t threads) {
    attention({batch, heads_of_queries, kv_heads, tokens, width, value_width, scale, first, heads(q, strides, 0),
               heads(k, strides, 1), heads(v, strides, 2), heads(y, strides, 3), heads(rest, strides, 3), totals},
              room, each, false, threads);
}

// strides: of q, k, v, y, dy, dq, dk, dv; rest has those of y.
void bloomery_attention_grads(const void *q, const void *k, const void *v, const void *y, const void *rest,
                               const void *dy, void *dq, void *dk, void *dv, const int64_t *strides,
                               const int64_t *first, float *totals, int64_t batch, int64_t heads_of_queries, int64_t kv_heads, int64_t tokens, int64_t width,
                               int64_t value_width, float scale, void *room, int64_t each, int64_t threads) {
    attention({batch, heads_of_queries, kv_heads, tokens, width, value_width, scale, first, heads(q, strides, 0),
               heads(k, strides, 1), heads(v, strides, 2), heads(y, strides, 3), heads(rest, strides, 3), totals,
               heads(dy, strides, 4), heads(dq, strides, 5),
               heads(dk, strides, 6), heads(dv, strides, 7)},
              room, each, true, threads);
}
}
