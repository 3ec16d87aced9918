// Products by pairs (AVX512-BF16). One side is kept: rearranged into panels of 32, a block that fits the second cache at
// a time. The other flows by it: rounded a few rows at a time while those before are multiplied, so that reading it
// takes no time of its own. What flows is the left side; but the right one, where that alone has to be rounded and is
// the larger of the two. The sums are turned then, before they are written.
#pragma once

#include "products.hpp"

#ifdef UNITS

namespace {

constexpr int64_t ROWS = 8, SUMS = ROWS * PANEL;                 // whose sums fill the registers
constexpr int64_t PAIRS_INNER = 1024, PAIRS_BLOCK = 256 * 1024;  // k's summed up without a stop; numbers of a block
constexpr int64_t AHEAD = 64;                                    // reads that are called for before they are made

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

struct Piece {
    int64_t k, until, steps;

    Piece(int64_t k, int64_t until) : k(k), until(until), steps((until - k + STEP - 1) / STEP) {}
};

// The order in which a side is read: units of so many rows, each row by row where k is contiguous, else a pair of k's
// of 16 rows at a time.
template <bool ALONG_K> struct Walk {
    static constexpr int64_t UNIT = ALONG_K ? ROWS : 16;
    int64_t first, row = 0, at = 0;

    INLINE_MEMBER explicit Walk(int64_t first) : first(first) {}
    static INLINE_MEMBER int64_t reads(int64_t steps) { return ALONG_K ? steps : steps * 16; }  // of a row
    static INLINE_MEMBER int64_t all(int64_t steps) { return reads(steps) * (ALONG_K ? ROWS : 1); }  // of a unit

    INLINE_MEMBER bool next(int64_t steps) {  // whether a unit is whole
        if (++at < reads(steps)) return false;
        at = 0;
        if (ALONG_K && ++row < ROWS) return false;
        row = 0;
        first += UNIT;
        return true;
    }
};

template <bool WIDE, bool ALONG_K> struct Flow {
    const Side &side;
    int64_t end;
    Piece piece;
    Walk<ALONG_K> now, soon;
    uint16_t *to;  // where the unit that is read goes
    bool whole = false;

    Flow(const Side &side, int64_t begin, int64_t end, const Piece &piece, uint16_t *to)
        : side(side), end(end), piece(piece), now(begin), soon(begin), to(to) {
        for (int64_t i = 0; i < AHEAD; i++) call();
    }

    INLINE_MEMBER void call() {
        if (soon.first >= end) return;
        const int64_t size = WIDE ? 4 : 2;
        const int64_t outer = ALONG_K ? soon.first + soon.row : piece.k + 2 * soon.at;
        const int64_t inner = ALONG_K ? piece.k + soon.at * STEP : soon.first;
        const char *const from = (const char *)side.numbers + (outer * side.stride + inner) * size;
        _mm_prefetch(from, _MM_HINT_T1);
        if (WIDE || !ALONG_K) _mm_prefetch(from + (ALONG_K ? 64 : side.stride * size), _MM_HINT_T1);
        soon.next(piece.steps);
    }

    INLINE_MEMBER void read() {
        call();
        const int64_t k = piece.k + now.at * (ALONG_K ? STEP : 2);
        const __m512i one = ALONG_K ? read_row<WIDE>(side, now.first + now.row, end, k, piece.until)
                                    : read_pair<WIDE>(side, now.first, end, k, piece.until);
        _mm512_store_si512(to + (ALONG_K ? now.at * ROWS + now.row : now.at) * STEP, one);
        whole = now.next(piece.steps);
    }
};

INLINE void clear(__m512 (*sum)[2]) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
}

// 16 pairs of k's of 8 rows, which lie ROW numbers apart and their pairs TWO, by a tile pair of a panel.
template <int64_t ROW, int64_t TWO> INLINE void add(__m512 (*sum)[2], const uint16_t *rows, const uint16_t *panel) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) {
        const __m512bh low = (__m512bh)_mm512_load_si512(panel + 32 * k);
        const __m512bh high = (__m512bh)_mm512_load_si512(panel + TILE + 32 * k);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            int32_t two;
            std::memcpy(&two, rows + ROW * i + TWO * k, sizeof two);
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, low);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, high);
        }
    }
}

// 8 rows of what flows by a panel of what is kept, while `reads` of the next rows are made in each step.
template <bool WIDE, bool ALONG_K>
INLINE void multiply(__m512 (*sum)[2], const uint16_t *rows, const uint16_t *panel, Flow<WIDE, ALONG_K> &flow,
                     int64_t reads) {
    constexpr int64_t ROW = ALONG_K ? STEP : 2, TWO = ALONG_K ? 2 : 2 * Walk<ALONG_K>::UNIT;
    clear(sum);
    for (int64_t step = 0; step < flow.piece.steps; step++, rows += Walk<ALONG_K>::UNIT * STEP, panel += PAIR) {
        for (int64_t i = 0; i < reads && !flow.whole; i++) flow.read();
        add<ROW, TWO>(sum, rows, panel);
    }
}

// Sums of 8 columns by 32 rows as rows of 8 numbers in bfloat16.
INLINE void write_turned(__m512 (*sum)[2], uint16_t *to, int64_t stride, int64_t rows, int64_t columns) {
    const __mmask8 seen = __mmask8(few(columns));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i pair[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            pair[i] = interleaved(rounded(sum[2 * i][half], sum[2 * i + 1][half]));
        const __m512i a = _mm512_unpacklo_epi32(pair[0], pair[1]), b = _mm512_unpackhi_epi32(pair[0], pair[1]);
        const __m512i c = _mm512_unpacklo_epi32(pair[2], pair[3]), d = _mm512_unpackhi_epi32(pair[2], pair[3]);
        const __m512i four[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                 _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
        const auto one = [&](int64_t row, __m128i numbers) {
            if (row < rows) _mm_mask_storeu_epi16(to + row * stride, seen, numbers);
        };
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            one(half * 16 + i, _mm512_castsi512_si128(four[i]));
            one(half * 16 + i + 4, _mm512_extracti32x4_epi32(four[i], 1));
            one(half * 16 + i + 8, _mm512_extracti32x4_epi32(four[i], 2));
            one(half * 16 + i + 12, _mm512_extracti32x4_epi32(four[i], 3));
        }
    }
}

// The same in float32, which no product of a linear layer asks for.
INLINE void write_turned_whole(__m512 (*sum)[2], float *to, int64_t stride, int64_t rows, int64_t columns, bool add) {
    alignas(64) float sums[ROWS][PANEL];
    for (int i = 0; i < ROWS; i++)
        for (int half = 0; half < 2; half++) _mm512_store_ps(sums[i] + 16 * half, sum[i][half]);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++) to[row * stride + i] = sums[i][row] + (add ? to[row * stride + i] : 0.0f);
}

struct Rectangle {
    const Product &p;
    bool turned;  // what is kept are rows of the result, and what flows are its columns
    int64_t kept_end, flow_end;
};

// Sums of 8 that flow, from `flowing` on, by 32 that are kept.
INLINE void put(const Rectangle &r, __m512 (*sum)[2], int64_t kept, int64_t flowing, const Piece &piece,
                float *partial) {
    const Product &p = r.p;
    const bool first = piece.k == 0, last = piece.until == p.inner;
    if (partial) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            for (int half = 0; half < 2; half++) {
                float *const at = partial + i * PANEL + half * 16;
                if (!first) sum[i][half] = _mm512_add_ps(sum[i][half], _mm512_load_ps(at));
                if (!last) _mm512_store_ps(at, sum[i][half]);
            }
        if (!last) return;
    }
    const int64_t rows = std::min(ROWS, r.flow_end - flowing);
    if (!r.turned) {
        const Into into(p, flowing, kept, r.kept_end, nullptr, 0, first || partial, last);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            if (i < rows) write(into, i, sum[i][0], sum[i][1]);
        return;
    }
    if (p.bias && last)
        for (int i = 0; i < ROWS; i++) {
            const __m512 bias = _mm512_set1_ps(i < rows ? p.bias[flowing + i] : 0.0f);
            for (int half = 0; half < 2; half++) sum[i][half] = _mm512_add_ps(sum[i][half], bias);
        }
    const int64_t at = kept * p.stride + flowing, panel = std::min(PANEL, r.kept_end - kept);
    if (p.output == Output::rounded) write_turned(sum, (uint16_t *)p.into + at, p.stride, panel, rows);
    else write_turned_whole(sum, (float *)p.into + at, p.stride, panel, rows, !first || p.output == Output::add);
}

// Calls what sums will be added to into the cache.
INLINE void call_result(const Rectangle &r, int64_t kept, int64_t flowing) {
    const Product &p = r.p;
    if (r.turned || p.output == Output::rounded) return;
    const float *at = (const float *)p.into + flowing * p.stride + kept;
    for (int64_t row = flowing; row < std::min(flowing + ROWS, r.flow_end); row++, at += p.stride) {
        _mm_prefetch((const char *)at, _MM_HINT_T0);
        _mm_prefetch((const char *)(at + 16), _MM_HINT_T0);
    }
}

template <bool WIDE, bool ALONG_K>
void flow_by(const Rectangle &r, const Side &kept, int64_t kept_begin, const Side &flowing, int64_t flow_begin) {
    constexpr int64_t UNIT = Walk<ALONG_K>::UNIT;
    const Product &p = r.p;
    const int64_t pieces = (p.inner + PAIRS_INNER - 1) / PAIRS_INNER;
    const int64_t length = (p.inner + pieces * STEP - 1) / (pieces * STEP) * STEP, whole = length / STEP * PAIR;
    const int64_t panels = (r.kept_end - kept_begin + PANEL - 1) / PANEL;
    const int64_t fits = std::max<int64_t>(1, PAIRS_BLOCK / whole), blocks = (panels + fits - 1) / fits;
    const int64_t block = (panels + blocks - 1) / blocks, groups = (r.flow_end - flow_begin + ROWS - 1) / ROWS;
    uint16_t *const panel = room<0>(block * whole), *const units = room<1>(2 * UNIT * length);
    const bool aside = pieces > 1 && p.output == Output::rounded;
    float *const partial = aside ? (float *)room<2>(2 * SUMS * block * groups) : nullptr;
    for (int64_t b = 0; b < panels; b += block) {
        for (int64_t k = 0; k < p.inner; k += length) {
            const Piece piece(k, std::min(k + length, p.inner));
            const int64_t stop = std::min(b + block, panels);
            pack(panel, kept, false, kept_begin + b * PANEL, kept_begin + stop * PANEL, r.kept_end, k, piece.until);
            uint16_t *here = units, *next = units + UNIT * length;
            Flow<WIDE, ALONG_K> flow(flowing, flow_begin, r.flow_end, piece, here);
            while (!flow.whole) flow.read();
            const int64_t turns = (stop - b) * (UNIT / ROWS) * piece.steps;
            const int64_t reads = (Walk<ALONG_K>::all(piece.steps) + turns - 1) / turns;
            for (int64_t first = flow_begin; first < r.flow_end; first += UNIT, std::swap(here, next)) {
                flow.to = next;
                flow.whole = flow.now.first >= r.flow_end;
                for (int64_t q = b; q < stop; q++) {
                    for (int64_t row = first; row < std::min(first + UNIT, r.flow_end); row += ROWS) {
                        const uint16_t *const rows = here + (row - first) * 2;  // a unit of 16 has pairs of all together
                        float *const sums = partial ? partial + ((row - flow_begin) / ROWS * block + q - b) * SUMS : nullptr;
                        __m512 sum[ROWS][2];
                        if (k > 0 || p.output == Output::add) call_result(r, kept_begin + q * PANEL, row);
                        multiply(sum, rows, panel + (q - b) * piece.steps * PAIR, flow, reads);
                        put(r, sum, kept_begin + q * PANEL, row, piece, sums);
                    }
                }
                while (!flow.whole) flow.read();
            }
        }
    }
    _mm_sfence();
}

void part_by_pairs(const Product &p, int64_t top, int64_t bottom, int64_t begin, int64_t end) {
    const bool turned = p.right.wide && !p.left.wide && p.rows < p.columns;
    const Side &kept = turned ? p.left : p.right, &flowing = turned ? p.right : p.left;
    const Rectangle r{p, turned, turned ? bottom : end, turned ? end : bottom};
    const int64_t kept_begin = turned ? top : begin, flow_begin = turned ? begin : top;
    const auto work = flowing.along_k ? flowing.wide ? flow_by<true, true> : flow_by<false, true>
                                      : flowing.wide ? flow_by<true, false> : flow_by<false, false>;
    work(r, kept, kept_begin, flowing, flow_begin);
}

#pragma GCC pop_options

}  // namespace

#endif
