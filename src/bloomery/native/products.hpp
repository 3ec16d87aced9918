// What products by tiles and by pairs share: sides, their rearrangement into panels, and where sums go.
#pragma once

#include "library.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 11 && !defined(PLAIN)
#define UNITS
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the header itself, in gcc 12
#include <immintrin.h>
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
constexpr int64_t TILE = 512, PAIR = 2 * TILE;          // numbers

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
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

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

// Two rows of 16 numbers become 16 pairs.
INLINE __m512i interleaved(__m512i two) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), two);
}

// 16 of the free dimension, which is contiguous, by a pair of k's; zeros where there are none.
template <bool WIDE> INLINE __m512i read_pair(const Side &side, int64_t first, int64_t free, int64_t k, int64_t inner) {
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
    return interleaved(pair);
}

// 32 k's of a row, along which they are contiguous; zeros where there are none.
template <bool WIDE> INLINE __m512i read_row(const Side &side, int64_t row, int64_t free, int64_t k, int64_t inner) {
    const __mmask16 low = row < free ? few(inner - k) : 0, high = row < free ? few(inner - k - 16) : 0;
    const int64_t at = row * side.stride + k;
    if (!WIDE) return _mm512_maskz_loadu_epi16(__mmask32(high) << 16 | low, (const uint16_t *)side.numbers + at);
    const float *const from = (const float *)side.numbers + at;
    return rounded(_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from + 16));
}

// 16 of the free dimension by 32 k's: along k a row each, else a pair of k's each.
template <bool WIDE, bool ALONG_K>
INLINE void read(__m512i *r, const Side &side, int64_t first, int64_t free, int64_t k, int64_t inner) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = ALONG_K ? read_row<WIDE>(side, first + i, free, k, inner)
                       : read_pair<WIDE>(side, first, free, k + 2 * i, inner);
}

// Calls 32 of the free dimension by 32 k's into the cache, where there are such.
template <bool WIDE, bool ALONG_K>
INLINE void call(const Side &side, int64_t first, int64_t free, int64_t k, int64_t inner) {
    const int64_t size = WIDE ? 4 : 2, from = ALONG_K ? first : k, until = std::min(from + 32, ALONG_K ? free : inner);
    const char *at = (const char *)side.numbers + (from * side.stride + (ALONG_K ? k : first)) * size;
    for (int64_t line = from; line < until; line++, at += side.stride * size) {
        _mm_prefetch(at, _MM_HINT_T0);
        if (WIDE) _mm_prefetch(at + 64, _MM_HINT_T0);
    }
}

template <bool WIDE, bool ALONG_K, bool TURN>
void pack_as(uint16_t *to, const Side &side, int64_t begin, int64_t end, int64_t free, int64_t k, int64_t until) {
    const int64_t steps = (until - k + STEP - 1) / STEP, panels = (end - begin + PANEL - 1) / PANEL;
    const int64_t outer = ALONG_K ? panels : steps, within = ALONG_K ? steps : panels;  // in the order of memory
    __m512i r[16];
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t w = 0; w < within; w++) {
            const int64_t panel = ALONG_K ? o : w, step = ALONG_K ? w : o;
            if (o + 1 < outer)
                call<WIDE, ALONG_K>(side, begin + (panel + ALONG_K) * PANEL, end, k + (step + !ALONG_K) * STEP, until);
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

#pragma GCC pop_options

#endif

}  // namespace
