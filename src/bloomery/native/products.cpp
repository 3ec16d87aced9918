// Products of matrices in bfloat16 with sums in float32, on processors that multiply them by tiles (AMX) or by pairs
// (AVX512-BF16): the three that a linear layer needs in training. Weights stay float32 in memory and are rounded on the
// way; so are no copies kept.
//
//     C[m, n] = Σ_k L[m, k] R[k, n]
//
// Both sides are rearranged into panels of 32 rows or columns, a block of R that fits the second cache at a time. The sum
// of each number is made in an order that depends on k alone, so that threads and rows beside it do not matter.

#include "library.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 11 && !defined(PLAIN)
#define UNITS
#include <cpuid.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the header itself, in gcc 12
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

enum Units : int64_t { none, pairs, tiles };
enum class Output : int64_t { rounded, set, add };  // bfloat16; float32, new or added to what is there

// A matrix by (free, k): `free` is its row as the left side, its column as the right one.
struct Side {
    const void *numbers;
    int64_t stride;  // in numbers, of the dimension that is not contiguous
    bool wide;       // float32, not bfloat16
    bool along_k;    // k is contiguous
};

struct Product {
    Side left, right;
    int64_t rows, columns, inner;
    Output output;
    void *into;
    int64_t stride;
    const float *bias;  // of columns; may be null
    Units units;
};

#ifdef UNITS

constexpr int64_t PANEL = 32, STEP = 32;                // rows or columns of a panel; k's of a pair of tiles
constexpr int64_t ROWS = 8;                             // whose sums fill the registers
constexpr int64_t TILE = 512, PAIR = 2 * TILE;          // numbers
constexpr int64_t MOST_INNER = 1536, MOST_OF_PAIRS = 4096;  // k's that are summed up without a stop
constexpr int64_t TILES_BLOCK = 320 * 1024, PAIRS_BLOCK = 160 * 1024;  // numbers of R, beside which L has room
constexpr int64_t PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2): ARCH_REQ_XCOMP_PERM

Units units_here() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1) || !__builtin_cpu_supports("avx512bw")) return none;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return pairs;
    return syscall(SYS_arch_prctl, PERMISSION, TILE_DATA) == 0 ? tiles : pairs;
}

// Memory of a thread that it keeps: what is rearranged there stays in its cache.
template <int> uint16_t *room(int64_t numbers) {
    static thread_local struct Kept {
        uint16_t *at = nullptr;
        int64_t numbers = 0;
        ~Kept() { std::free(at); }
    } kept;
    if (kept.numbers < numbers) {
        std::free(kept.at);
        kept.at = (uint16_t *)std::aligned_alloc(64, (numbers * 2 + 63) / 64 * 64);
        kept.numbers = kept.at ? numbers : 0;
        if (!kept.at) std::abort();
    }
    return kept.at;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

INLINE __mmask16 few(int64_t count) { return __mmask16(count >= 16 ? 0xFFFF : count <= 0 ? 0 : (1 << count) - 1); }

INLINE __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// 16 rows of 16 pairs of numbers become 16 columns of them.
INLINE void transpose(__m512i *r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
        t[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, b, 0xDD);
        t[12 + i] = _mm512_shuffle_i32x4(c, d, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// 16 of the free dimension, which is contiguous, by a pair of k's; zeros where there are none.
template <bool WIDE> INLINE __m512i read_pair(const Side &side, int64_t first, int64_t free, int64_t k, int64_t inner) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __mmask16 seen = few(free - first), even = k < inner ? seen : 0, odd = k + 1 < inner ? seen : 0;
    const int64_t at = k * side.stride + first;
    __m512i pair;
    if (WIDE) {
        const float *const from = (const float *)side.numbers + at;
        pair = rounded(_mm512_maskz_loadu_ps(even, from), _mm512_maskz_loadu_ps(odd, from + side.stride));
    } else {
        const uint16_t *const from = (const uint16_t *)side.numbers + at;
        const __m256i low = _mm256_maskz_loadu_epi16(even, from);
        pair = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_maskz_loadu_epi16(odd, from + side.stride), 1);
    }
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), pair);
}

// 16 of the free dimension by 32 k's, zeros where there are none: along k a row each, else a pair of k's each.
template <bool WIDE, bool ALONG_K>
INLINE void read(__m512i *r, const Side &side, int64_t first, int64_t free, int64_t k, int64_t inner) {
    if (ALONG_K) {
        const __mmask16 low = few(inner - k), high = few(inner - k - 16);
        const __mmask32 both = __mmask32(high) << 16 | low;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const int64_t at = (first + i) * side.stride + k;
            if (first + i >= free) r[i] = _mm512_setzero_si512();
            else if (!WIDE) r[i] = _mm512_maskz_loadu_epi16(both, (const uint16_t *)side.numbers + at);
            else {
                const float *const from = (const float *)side.numbers + at;
                r[i] = rounded(_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from + 16));
            }
        }
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = read_pair<WIDE>(side, first, free, k + 2 * i, inner);
}

// What is read next, called into the second cache a line at a time while something else is computed.
struct Ahead {
    const char *at = nullptr;
    int64_t run = 0, step = 0, left = 0, here = 0;  // bytes that lie together, from one such to the next, how many more

    Ahead() = default;
    Ahead(const Side &side, int64_t first, int64_t stop, int64_t k, int64_t until) {
        const int64_t size = side.wide ? 4 : 2, outer = side.along_k ? first : k, inner = side.along_k ? k : first;
        at = (const char *)side.numbers + (outer * side.stride + inner) * size;
        run = (side.along_k ? until - k : stop - first) * size;
        step = side.stride * size;
        left = side.along_k ? stop - first : until - k;
    }

    void call() {
        if (left <= 0) return;
        _mm_prefetch(at + here, _MM_HINT_T1);
        here += 64;
        if (here >= run) here = 0, at += step, left--;
    }
};

template <bool WIDE, bool ALONG_K, bool TURN>
void pack_as(uint16_t *to, const Side &side, int64_t begin, int64_t end, int64_t free, int64_t k, int64_t until) {
    const int64_t steps = (until - k + STEP - 1) / STEP, panels = (end - begin + PANEL - 1) / PANEL;
    const int64_t outer = ALONG_K ? panels : steps, within = ALONG_K ? steps : panels;  // in the order of memory
    __m512i r[16];
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t w = 0; w < within; w++) {
            const int64_t panel = ALONG_K ? o : w, step = ALONG_K ? w : o;
            for (int64_t half = 0; half < 2; half++) {
                read<WIDE, ALONG_K>(r, side, begin + panel * PANEL + half * 16, free, k + step * STEP, until);
                if (TURN) transpose(r);
                uint16_t *const tile = to + (panel * steps + step) * PAIR + half * TILE;
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, r[i]);
            }
        }
    }
}

// Panels begin … end of the left side, whose tiles are rows of k's, or of the right one: rows of pairs of k's.
void pack(uint16_t *to, const Side &side, bool left, int64_t begin, int64_t end, int64_t free, int64_t k,
          int64_t until) {
    if (side.along_k && left) side.wide ? pack_as<true, true, false>(to, side, begin, end, free, k, until)
                                        : pack_as<false, true, false>(to, side, begin, end, free, k, until);
    else if (side.along_k) side.wide ? pack_as<true, true, true>(to, side, begin, end, free, k, until)
                                     : pack_as<false, true, true>(to, side, begin, end, free, k, until);
    else if (left) side.wide ? pack_as<true, false, true>(to, side, begin, end, free, k, until)
                             : pack_as<false, false, true>(to, side, begin, end, free, k, until);
    else side.wide ? pack_as<true, false, false>(to, side, begin, end, free, k, until)
                   : pack_as<false, false, false>(to, side, begin, end, free, k, until);
}

// Where sums go. `partial` has the sums over the k's before, and takes those so far, where these are not the first or
// the last.
struct Into {
    const Product &p;
    int64_t row, column;
    float *partial;
    int64_t width;
    bool first, last;
    __mmask16 low, high;
    __m512 bias[2];

    Into(const Product &p, int64_t row, int64_t column, int64_t columns, float *partial, int64_t width, bool first,
         bool last)
        : p(p), row(row), column(column), partial(partial), width(width), first(first), last(last),
          low(few(columns - column)), high(few(columns - column - 16)) {
        const bool biased = p.bias && last;
        bias[0] = biased ? _mm512_maskz_loadu_ps(low, p.bias + column) : _mm512_setzero_ps();
        bias[1] = biased ? _mm512_maskz_loadu_ps(high, p.bias + column + 16) : _mm512_setzero_ps();
    }
};

INLINE void write(const Into &into, int64_t i, __m512 a, __m512 b) {
    const Product &p = into.p;
    const int64_t at = (into.row + i) * p.stride + into.column;
    a = _mm512_add_ps(a, into.bias[0]);
    b = _mm512_add_ps(b, into.bias[1]);
    float *before = into.partial ? into.partial + i * into.width : nullptr;
    if (p.output != Output::rounded) before = (float *)p.into + at;
    if (before && (!into.first || p.output == Output::add)) {
        a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(into.low, before));
        b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(into.high, before + 16));
    }
    if (p.output == Output::rounded && into.last) {
        _mm512_mask_storeu_epi16((uint16_t *)p.into + at, __mmask32(into.high) << 16 | into.low, rounded(a, b));
    } else if (into.first && into.last && into.high == 0xFFFF && p.output == Output::set && (uintptr_t)before % 64 == 0) {
        _mm512_stream_ps(before, a);  // past the caches: nobody reads it soon
        _mm512_stream_ps(before + 16, b);
    } else {
        _mm512_mask_storeu_ps(before, into.low, a);
        _mm512_mask_storeu_ps(before + 16, into.high, b);
    }
}

// A panel by a panel: 32 x 32 sums.
INLINE void multiply_tiles(const uint16_t *left, const uint16_t *right, int64_t steps, int64_t count, const Into &into) {
    alignas(64) float sums[PANEL * PANEL];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, left += PAIR, right += PAIR) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
    for (int64_t i = 0; i < count; i++) write(into, i, _mm512_load_ps(sums + 32 * i), _mm512_load_ps(sums + 32 * i + 16));
}

// The same without tiles, 8 rows at a time: so many sums stay in registers.
INLINE void multiply_pairs(const uint16_t *left, const uint16_t *right, int64_t steps, int64_t count, const Into &into,
                           Ahead &ahead, int64_t lines) {
    for (int64_t rows = 0; rows < count; rows += ROWS) {
        const uint16_t *l = left + rows * STEP, *r = right;
        __m512 sum[ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; step++, l += PAIR, r += PAIR) {
            for (int64_t line = 0; line < lines; line++) ahead.call();
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) {
                const __m512bh low = (__m512bh)_mm512_load_si512(r + 32 * k);
                const __m512bh high = (__m512bh)_mm512_load_si512(r + TILE + 32 * k);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    int32_t two;
                    std::memcpy(&two, l + STEP * i + 2 * k, sizeof two);
                    const __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, low);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, high);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            if (rows + i < count) write(into, rows + i, sum[i][0], sum[i][1]);
    }
}

void part(const Product &p, int64_t top, int64_t bottom, int64_t begin, int64_t end) {
    const Config config;
    if (p.units == tiles) _tile_loadconfig(&config);
    // Where float32 sums would wait in the result itself, which is large, pairs take more at once.
    const int64_t most = p.units == pairs && p.output != Output::rounded ? MOST_OF_PAIRS : MOST_INNER;
    const int64_t block = p.units == pairs ? PAIRS_BLOCK : TILES_BLOCK, pieces = (p.inner + most - 1) / most;
    const int64_t piece = (p.inner + pieces * STEP - 1) / (pieces * STEP) * STEP, whole = piece / STEP * PAIR;
    const int64_t fits = std::max<int64_t>(1, block / (piece * PANEL)), panels = (end - begin + PANEL - 1) / PANEL;
    const int64_t blocks = (panels + fits - 1) / fits, wide = (panels + blocks - 1) / blocks * PANEL;
    const int64_t heights = (bottom - top + PANEL - 1) / PANEL, width = (panels + 1) * PANEL;
    uint16_t *const right = room<0>(wide / PANEL * whole), *const left = room<1>(blocks > 1 ? heights * whole : whole);
    const bool aside = pieces > 1 && p.output == Output::rounded;
    float *const partial = aside ? (float *)room<2>(2 * heights * PANEL * width) : nullptr;
    for (int64_t k = 0; k < p.inner; k += piece) {
        const int64_t until = std::min(k + piece, p.inner), steps = (until - k + STEP - 1) / STEP;
        if (blocks > 1) pack(left, p.left, true, top, bottom, bottom, k, until);
        for (int64_t first = begin; first < end; first += wide) {
            const int64_t stop = std::min(first + wide, end);
            pack(right, p.right, false, first, stop, end, k, until);
            const int64_t after = std::min(until + piece, p.inner);
            Ahead ahead;
            if (stop < end) ahead = Ahead(p.right, stop, std::min(stop + wide, end), k, until);
            else if (until < p.inner) ahead = Ahead(p.right, begin, std::min(begin + wide, end), until, after);
            const int64_t turns = heights * ((stop - first + PANEL - 1) / PANEL) * (PANEL / ROWS) * steps;
            const int64_t lines = (ahead.left * ((ahead.run + 63) / 64) + turns - 1) / turns;
            for (int64_t row = top; row < bottom; row += PANEL) {
                const uint16_t *const panel = blocks > 1 ? left + (row - top) / PANEL * steps * PAIR : left;
                if (blocks == 1) pack(left, p.left, true, row, row + PANEL, bottom, k, until);
                for (int64_t column = first; column < stop; column += PANEL) {
                    const uint16_t *const beside = right + (column - first) / PANEL * steps * PAIR;
                    float *const so_far = partial ? partial + (row - top) * width + column - begin : nullptr;
                    const Into into(p, row, column, end, so_far, width, k == 0, until == p.inner);
                    const int64_t count = std::min(PANEL, bottom - row);
                    if (p.units == tiles) multiply_tiles(panel, beside, steps, count, into);
                    else multiply_pairs(panel, beside, steps, count, into, ahead, lines);
                }
            }
        }
    }
    if (p.units == tiles) _tile_release();
    _mm_sfence();
}

#pragma GCC pop_options

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
        if (top < bottom && begin < end) part(p, top, bottom, begin, end);
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
