// Causal attention by pairs (AVX512-BF16), with its gradients: y = softmax(q kᵀ · scale) v, where a query sees the keys
// from a first one to itself. Scores exist in float32 for 8 queries at a time, and for no panel of 32 keys that none of
// them sees; the gradients compute them again from the largest of each query and the logarithm of its sum (Dao 2023,
// https://arxiv.org/abs/2307.08691). A task is one head of keys and values with all heads of queries that share it.
//
// Keys and values often have a mean that all share, which must cancel: so weights are divided by the sum of what they
// were rounded to, and what y lost when it was rounded is kept for the gradients.
#pragma once

#include "numbers.hpp"
#include "products_pairs.hpp"

namespace {

// Strides in numbers; those within a head are 1.
struct Heads {
    uint16_t *numbers;
    int64_t batch, head, token;

    INLINE_MEMBER uint16_t *at(int64_t b, int64_t h) const { return numbers + b * batch + h * head; }
};

struct Attention {
    int64_t batch, heads, kv_heads, tokens, width, value_width;
    float scale;
    const int64_t *first;  // [batch, tokens]
    Heads q, k, v, y, rest;  // y + rest is nearer to the result than y; rest may be null
    float *totals;           // [batch, heads, tokens, 2]: of each query, in powers of 2: its largest score, and the
                             // logarithm of the sum of its exponentials after that was taken away
    Heads dy, dq, dk, dv;
};

}  // namespace

#ifdef UNITS

namespace {

constexpr int64_t QUERIES = 64, AT_ONCE = 4;  // of which grads are computed together; panels of keys, likewise
constexpr float LOG2E = 1.44269504f;

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

INLINE int64_t panels_of(const Attention &a) { return (a.tokens + PANEL - 1) / PANEL; }

// Memory of a thread, handed out from its beginning.
struct Room {
    char *at;

    template <class T> T *take(int64_t count) {
        T *const here = (T *)at;
        at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return here;
    }
};

// 2**x of x ≤ 0 to about 3e-6, and 0 where `seen` has no bit. Below −126 it stays as it is there: no number is denormal.
INLINE __m512 power(__mmask16 seen, __m512 x) {
    x = _mm512_min_ps(_mm512_setzero_ps(), _mm512_max_ps(_mm512_set1_ps(-126.0f), x));  // of NaN: NaN
    const __m512 n = _mm512_roundscale_ps(x, 0), rest = _mm512_sub_ps(x, n);
    __m512 sum = _mm512_set1_ps(1.33335581e-3f);  // ln(2)**i / i!
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.61812911e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.55041087e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.240226507f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.693147181f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(seen, sum, n);
}

// Which keys 8 queries see.
struct Eight {
    int64_t query, end;  // the first of them; behind the last
    int64_t first[ROWS], lowest, highest;

    Eight(const Attention &a, int64_t b, int64_t query) : query(query), end(std::min(query + ROWS, a.tokens)) {
        lowest = INT64_MAX, highest = 0;
        for (int64_t i = 0; i < ROWS; i++) {
            first[i] = query + i < end ? a.first[b * a.tokens + query + i] : INT64_MAX;
            if (query + i < end) lowest = std::min(lowest, first[i]), highest = std::max(highest, first[i]);
        }
    }

    int64_t begin_panel() const { return lowest / PANEL; }
    int64_t end_panel() const { return (end + PANEL - 1) / PANEL; }
    bool sees_all(int64_t panel) const {
        return end == query + ROWS && highest <= panel * PANEL && panel * PANEL + PANEL <= query + 1;
    }
    uint32_t seen(int64_t i, int64_t panel) const {  // keys of a panel, a bit each
        if (query + i >= end) return 0;
        const int64_t from = std::min(std::max<int64_t>(first[i] - panel * PANEL, 0), PANEL);
        const int64_t to = std::min(std::max<int64_t>(query + i + 1 - panel * PANEL, 0), PANEL);
        return uint32_t(((1ull << to) - 1) & ~((1ull << from) - 1));
    }
};

// 8 tokens of a head, 32 numbers of each after the other; zeros for tokens that there are not.
INLINE void take_rows(uint16_t *to, const uint16_t *from, int64_t stride, int64_t row, int64_t rows, int64_t steps) {
    for (int64_t step = 0; step < steps; step++)
        for (int64_t i = 0; i < ROWS; i++, to += STEP)
            _mm512_store_si512(to, row + i < rows ? _mm512_loadu_si512(from + (row + i) * stride + step * STEP)
                                                  : _mm512_setzero_si512());
}

// Calls tokens `from` … `until` of a head into the cache, where there are such.
INLINE void call_rows(const Attention &a, const Heads &of, int64_t b, int64_t h, int64_t width, int64_t from,
                      int64_t until) {
    const uint16_t *const head = of.at(b, h);
    for (int64_t t = from; t < std::min(until, a.tokens); t++)
        for (int64_t e = 0; e < width; e += STEP) _mm_prefetch((const char *)(head + t * of.token + e), _MM_HINT_T0);
}

// Likewise of the keys and values that the next task takes.
INLINE void call_next(const Attention &a, int64_t task, int64_t from, int64_t until) {
    const int64_t b = (task + 1) / a.kv_heads, shared = (task + 1) % a.kv_heads;
    if (b == a.batch) return;
    call_rows(a, a.k, b, shared, a.width, from, until);
    call_rows(a, a.v, b, shared, a.value_width, from, until);
}

INLINE void give_row(uint16_t *to, __m512 low, __m512 high) { _mm512_storeu_si512(to, rounded(low, high)); }

// Every other number of 32 in bfloat16, and those between.
INLINE __m512 first_half(__m512i both) { return _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)); }
INLINE __m512 second_half(__m512i both) {
    return _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int32_t(0xFFFF0000))));
}
// 16 numbers in bfloat16.
INLINE __m512 widened(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

INLINE void read_sums(__m512 (*sum)[2], const float *from, int64_t stride) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int half = 0; half < 2; half++) sum[i][half] = _mm512_load_ps(from + i * stride + 16 * half);
}

INLINE void keep_sums(__m512 (*sum)[2], float *to, int64_t stride) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int half = 0; half < 2; half++) _mm512_store_ps(to + i * stride + 16 * half, sum[i][half]);
}

// 8 rows of `steps` steps each by a panel.
INLINE void scores(__m512 (*sum)[2], const uint16_t *rows, const uint16_t *panel, int64_t steps) {
    clear(sum);
    for (int64_t step = 0; step < steps; step++) add<STEP, 2>(sum, rows + step * ROWS * STEP, panel + step * PAIR);
}

// Weights of 8 queries, of which those of a panel stand together, row by row, not yet divided by their sums.
INLINE void weigh(const Attention &a, const Eight &eight, const uint16_t *rows, const uint16_t *keys, float *scored,
                  uint16_t *weights, float *sums, float *totals) {
    const int64_t steps = a.width / STEP, begin = eight.begin_panel(), end = eight.end_panel();
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    alignas(64) float highest[ROWS][16];
    for (int64_t i = 0; i < ROWS; i++) _mm512_store_ps(highest[i], lowest);
    for (int64_t panel = begin; panel < end; panel++) {
        __m512 sum[ROWS][2];
        scores(sum, rows, keys + panel * steps * PAIR, steps);
        if (!eight.sees_all(panel)) {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                const uint32_t seen = eight.seen(i, panel);
                sum[i][0] = _mm512_mask_blend_ps(__mmask16(seen), lowest, sum[i][0]);
                sum[i][1] = _mm512_mask_blend_ps(__mmask16(seen >> 16), lowest, sum[i][1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            _mm512_store_ps(highest[i], _mm512_max_ps(_mm512_load_ps(highest[i]), _mm512_max_ps(sum[i][0], sum[i][1])));
        keep_sums(sum, scored + (panel - begin) * SUMS, PANEL);
    }
    const float by = a.scale * LOG2E;
    const __m512 factor = _mm512_set1_ps(by);
    for (int64_t i = 0; i < ROWS; i++) {
        const bool there = eight.query + i < eight.end;
        const float most = there ? _mm512_reduce_max_ps(_mm512_load_ps(highest[i])) * by : 0.0f;
        const __m512 less = _mm512_set1_ps(-most);
        __m512 low = _mm512_setzero_ps(), high = low;
        for (int64_t panel = begin; panel < end; panel++) {
            const int64_t at = (panel - begin) * SUMS + i * PANEL;
            const uint32_t seen = eight.sees_all(panel) ? ~0u : eight.seen(i, panel);
            const __m512 one = power(__mmask16(seen), _mm512_fmadd_ps(_mm512_load_ps(scored + at), factor, less));
            const __m512 two = power(__mmask16(seen >> 16), _mm512_fmadd_ps(_mm512_load_ps(scored + at + 16), factor, less));
            const __m512i both = rounded(one, two);
            low = _mm512_add_ps(low, first_half(both));
            high = _mm512_add_ps(high, second_half(both));
            _mm512_store_si512(weights + at, both);
        }
        sums[i] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
        if (there) {
            totals[2 * (eight.query + i)] = most;
            totals[2 * (eight.query + i) + 1] = std::log2(sums[i]);
        }
    }
}

void attend(const Attention &a, int64_t task, Room room) {
    const int64_t b = task / a.kv_heads, shared = task % a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t steps = a.width / STEP, wide = a.value_width / PANEL, panels = panels_of(a);
    uint16_t *const keys = room.take<uint16_t>(panels * PANEL * a.width);
    uint16_t *const values = room.take<uint16_t>(panels * PANEL * a.value_width);
    uint16_t *const rows = room.take<uint16_t>(ROWS * a.width), *const weights = room.take<uint16_t>(panels * SUMS);
    float *const scored = room.take<float>(panels * SUMS), sums[ROWS] = {};
    pack(keys, {a.k.at(b, shared), a.k.token, false, true}, false, 0, a.tokens, a.tokens, 0, a.width);
    pack(values, {a.v.at(b, shared), a.v.token, false, false}, false, 0, a.value_width, a.value_width, 0, a.tokens);
    for (int64_t h = shared * group; h < (shared + 1) * group; h++) {
        for (int64_t query = 0; query < a.tokens; query += ROWS) {
            const Eight eight(a, b, query);
            const int64_t begin = eight.begin_panel(), end = eight.end_panel();
            call_rows(a, a.q, b, h, a.width, query + 2 * ROWS, query + 3 * ROWS);
            if (h == shared * group) call_next(a, task, query, query + ROWS);
            take_rows(rows, a.q.at(b, h), a.q.token, query, a.tokens, steps);
            weigh(a, eight, rows, keys, scored, weights, sums, a.totals + (b * a.heads + h) * a.tokens * 2);
            for (int64_t w = 0; w < wide; w++) {
                __m512 sum[ROWS][2];
                clear(sum);
                for (int64_t panel = begin; panel < end; panel++)
                    add<STEP, 2>(sum, weights + (panel - begin) * SUMS, values + (w * panels + panel) * PAIR);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    if (query + i >= eight.end) continue;
                    const __m512 share = _mm512_set1_ps(1.0f / sums[i]);
                    const __m512 low = _mm512_mul_ps(sum[i][0], share), high = _mm512_mul_ps(sum[i][1], share);
                    const __m512i both = rounded(low, high);
                    _mm512_storeu_si512(a.y.at(b, h) + (query + i) * a.y.token + w * PANEL, both);
                    if (a.rest.numbers)
                        give_row(a.rest.at(b, h) + (query + i) * a.rest.token + w * PANEL,
                                 _mm512_sub_ps(low, widened(_mm512_castsi512_si256(both))),
                                 _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(both, 1))));
                }
            }
        }
    }
}

// What the gradients of one head of queries are computed from, and where they go.
struct Gradients {
    const Attention &a;
    int64_t b, h;
    uint16_t *keys, *values;         // as columns of scores: panels of keys, along their width
    uint16_t *key_columns;           // as columns of what queries get: panels of the width, along keys
    float *dk, *dv;                  // [keys, width], sums over queries
    uint16_t *q_rows, *dy_rows;      // of a block of queries, 8 at a time
    uint16_t *q_columns, *dy_columns;
    float *dq;                       // [queries of a block, width]
    uint16_t *weights, *grads;      // of panels of keys: pairs of queries by 32 keys
    uint16_t *grad_rows;            // of panels of keys: 8 queries by 32 keys at a time
    float most[QUERIES], logarithms[QUERIES], means[QUERIES];
};

// Of a query: Σ dy · (y + rest), which is the mean of the gradients of its weights.
INLINE float mean(const uint16_t *dy, const uint16_t *y, const uint16_t *rest, int64_t width) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t e = 0; e < width; e += STEP) {
        const __m512bh grad = (__m512bh)_mm512_loadu_si512(dy + e);
        sum = _mm512_dpbf16_ps(sum, grad, (__m512bh)_mm512_loadu_si512(y + e));
        sum = _mm512_dpbf16_ps(sum, grad, (__m512bh)_mm512_loadu_si512(rest + e));
    }
    return _mm512_reduce_add_ps(sum);
}

// Weights and gradients of scores of 8 queries by the keys of a panel, the former from the logarithms of their sums.
INLINE void turn_back(Gradients &s, const Eight &eight, int64_t g, int64_t panel, int64_t place) {
    const Attention &a = s.a;
    const int64_t steps = a.width / STEP, value_steps = a.value_width / STEP;
    uint16_t *const weights = s.weights + (place * QUERIES + g * ROWS) * PANEL;
    uint16_t *const grads = s.grads + (place * QUERIES + g * ROWS) * PANEL;
    uint16_t *const rows = s.grad_rows + (place * QUERIES + g * ROWS) * PANEL;
    const bool none = panel < eight.begin_panel() || panel >= eight.end_panel() || eight.query >= eight.end;
    if (none) {
        std::memset(weights, 0, SUMS * 2);
        std::memset(grads, 0, SUMS * 2);
        std::memset(rows, 0, SUMS * 2);
        return;
    }
    __m512 sum[ROWS][2];
    alignas(64) float weight[ROWS][PANEL];
    const __m512 factor = _mm512_set1_ps(a.scale * LOG2E);
    const bool whole = eight.sees_all(panel);
    scores(sum, s.q_rows + g * ROWS * a.width, s.keys + panel * steps * PAIR, steps);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        const uint32_t seen = whole ? ~0u : eight.seen(i, panel);
        const __m512 less = _mm512_set1_ps(-s.most[g * ROWS + i]), share = _mm512_set1_ps(s.logarithms[g * ROWS + i]);
        sum[i][0] = power(__mmask16(seen), _mm512_sub_ps(_mm512_fmadd_ps(sum[i][0], factor, less), share));
        sum[i][1] = power(__mmask16(seen >> 16), _mm512_sub_ps(_mm512_fmadd_ps(sum[i][1], factor, less), share));
    }
    keep_sums(sum, weight[0], PANEL);
    const auto pairs = [&](uint16_t *to) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i += 2)
            for (int half = 0; half < 2; half++)
                _mm512_store_si512(to + i * PANEL + half * STEP, interleaved(rounded(sum[i][half], sum[i + 1][half])));
    };
    pairs(weights);
    scores(sum, s.dy_rows + g * ROWS * a.value_width, s.values + panel * value_steps * PAIR, value_steps);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        const __m512 mean = _mm512_set1_ps(s.means[g * ROWS + i]), scale = _mm512_set1_ps(a.scale);
        for (int half = 0; half < 2; half++) {
            const __m512 p = _mm512_mul_ps(_mm512_load_ps(weight[i] + 16 * half), scale);
            sum[i][half] = _mm512_mul_ps(p, _mm512_sub_ps(sum[i][half], mean));
        }
        _mm512_store_si512(rows + i * STEP, rounded(sum[i][0], sum[i][1]));
    }
    pairs(grads);
}

// Adds to [keys of a panel, width]: columns of pairs of queries, by rows of them.
INLINE void gather(float *to, int64_t width, const uint16_t *pairs, const uint16_t *columns, int64_t from, int64_t steps) {
    for (int64_t w = 0; w < width / PANEL; w++) {
        for (int64_t key = 0; key < PANEL; key += ROWS) {
            float *const at = to + key * width + w * PANEL;
            __m512 sum[ROWS][2];
            read_sums(sum, at, width);
            for (int64_t step = from; step < steps; step++)
                add<2, 2 * PANEL>(sum, pairs + step * STEP * PANEL + 2 * key, columns + (w * steps + step) * PAIR);
            keep_sums(sum, at, width);
        }
    }
}

// Calls 8 queries of the block that comes next, of this head or of another.
INLINE void call_block(const Gradients &s, int64_t task, int64_t query, int64_t g) {
    const Attention &a = s.a;
    const bool same = query + QUERIES < a.tokens;
    const int64_t place = s.b * a.heads + s.h + !same, first = (same ? query + QUERIES : 0) + g * ROWS;
    if (s.h % (a.heads / a.kv_heads) == 0) call_next(a, task, query + g * ROWS, query + g * ROWS + ROWS);
    if (place == a.batch * a.heads) return;
    const int64_t b = place / a.heads, h = place % a.heads;
    call_rows(a, a.q, b, h, a.width, first, first + ROWS);
    call_rows(a, a.dy, b, h, a.value_width, first, first + ROWS);
    call_rows(a, a.y, b, h, a.value_width, first, first + ROWS);
    call_rows(a, a.rest, b, h, a.value_width, first, first + ROWS);
}

void block_grads(Gradients &s, int64_t task, int64_t query) {
    const Attention &a = s.a;
    const int64_t b = s.b, h = s.h, panels = panels_of(a), until = std::min(query + QUERIES, a.tokens);
    const int64_t steps = (until - query + STEP - 1) / STEP, groups = steps * STEP / ROWS;
    const Side q{a.q.at(b, h), a.q.token, false, false}, dy{a.dy.at(b, h), a.dy.token, false, false};
    pack(s.q_columns, q, false, 0, a.width, a.width, query, until);
    pack(s.dy_columns, dy, false, 0, a.value_width, a.value_width, query, until);
    std::memset(s.dq, 0, QUERIES * a.width * sizeof(float));
    int64_t begin = INT64_MAX;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = query + g * ROWS;
        take_rows(s.q_rows + g * ROWS * a.width, a.q.at(b, h), a.q.token, first, a.tokens, a.width / STEP);
        take_rows(s.dy_rows + g * ROWS * a.value_width, a.dy.at(b, h), a.dy.token, first, a.tokens, a.value_width / STEP);
        for (int64_t t = first; t < first + ROWS; t++) {
            const bool there = t < a.tokens;
            const float *const totals = a.totals + 2 * ((b * a.heads + h) * a.tokens + t);
            s.most[t - query] = there ? totals[0] : 0;
            s.logarithms[t - query] = there ? totals[1] : 0;
            s.means[t - query] = there ? mean(a.dy.at(b, h) + t * a.dy.token, a.y.at(b, h) + t * a.y.token,
                                              a.rest.at(b, h) + t * a.rest.token, a.value_width)
                                       : 0;
            if (there) begin = std::min(begin, a.first[b * a.tokens + t] / PANEL);
        }
    }
    const int64_t end = (until + PANEL - 1) / PANEL;
    for (int64_t from = begin; from < end; from += AT_ONCE) {
        const int64_t to = std::min(from + AT_ONCE, end);
        for (int64_t g = 0; g < groups; g++) {
            const Eight eight(a, b, query + g * ROWS);
            if (from == begin) call_block(s, task, query, g);
            for (int64_t panel = from; panel < to; panel++) turn_back(s, eight, g, panel, panel - from);
            for (int64_t w = 0; w < a.width / PANEL; w++) {
                float *const at = s.dq + g * ROWS * a.width + w * PANEL;
                __m512 sum[ROWS][2];
                read_sums(sum, at, a.width);
                for (int64_t panel = std::max(from, eight.begin_panel()); panel < std::min(to, eight.end_panel()); panel++)
                    add<STEP, 2>(sum, s.grad_rows + ((panel - from) * QUERIES + g * ROWS) * PANEL,
                                 s.key_columns + (w * panels + panel) * PAIR);
                keep_sums(sum, at, a.width);
            }
        }
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t place = (panel - from) * QUERIES * PANEL;
            const int64_t late = std::max<int64_t>(0, panel * PANEL - query) / STEP;  // queries before see none of it
            gather(s.dv + panel * PANEL * a.value_width, a.value_width, s.weights + place, s.dy_columns, late, steps);
            gather(s.dk + panel * PANEL * a.width, a.width, s.grads + place, s.q_columns, late, steps);
        }
    }
    for (int64_t t = query; t < until; t++)
        for (int64_t e = 0; e < a.width; e += PANEL) {
            const float *const from = s.dq + (t - query) * a.width + e;
            give_row(a.dq.at(b, h) + t * a.dq.token + e, _mm512_load_ps(from), _mm512_load_ps(from + 16));
        }
}

void attend_back(const Attention &a, int64_t task, Room room) {
    const int64_t b = task / a.kv_heads, shared = task % a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t width = a.width, wide = a.value_width, all = panels_of(a) * PANEL, many = AT_ONCE * QUERIES * PANEL;
    Gradients s{a, b, 0};
    s.keys = room.take<uint16_t>(all * width);
    s.values = room.take<uint16_t>(all * wide);
    s.key_columns = room.take<uint16_t>(all * width);
    s.dk = room.take<float>(all * width);
    s.dv = room.take<float>(all * wide);
    s.q_rows = room.take<uint16_t>(QUERIES * width);
    s.dy_rows = room.take<uint16_t>(QUERIES * wide);
    s.q_columns = room.take<uint16_t>(QUERIES * width);
    s.dy_columns = room.take<uint16_t>(QUERIES * wide);
    s.dq = room.take<float>(QUERIES * width);
    s.weights = room.take<uint16_t>(many);
    s.grads = room.take<uint16_t>(many);
    s.grad_rows = room.take<uint16_t>(many);
    pack(s.keys, {a.k.at(b, shared), a.k.token, false, true}, false, 0, a.tokens, a.tokens, 0, width);
    pack(s.values, {a.v.at(b, shared), a.v.token, false, true}, false, 0, a.tokens, a.tokens, 0, wide);
    pack(s.key_columns, {a.k.at(b, shared), a.k.token, false, false}, false, 0, width, width, 0, a.tokens);
    std::memset(s.dk, 0, all * width * sizeof(float));
    std::memset(s.dv, 0, all * wide * sizeof(float));
    for (s.h = shared * group; s.h < (shared + 1) * group; s.h++)
        for (int64_t query = 0; query < a.tokens; query += QUERIES) block_grads(s, task, query);
    const auto give = [&](const Heads &to, const float *from, int64_t size) {
        for (int64_t t = 0; t < a.tokens; t++)
            for (int64_t e = 0; e < size; e += PANEL)
                give_row(to.at(b, shared) + t * to.token + e, _mm512_load_ps(from + t * size + e),
                         _mm512_load_ps(from + t * size + e + 16));
    };
    give(a.dk, s.dk, width);
    give(a.dv, s.dv, wide);
}

#pragma GCC pop_options

// Bytes that a thread needs.
int64_t attention_room(int64_t tokens, int64_t width, int64_t wide, bool grads) {
    const int64_t all = (tokens + PANEL - 1) / PANEL * PANEL;
    if (!grads) return 2 * (all + ROWS) * (width + wide) + 6 * all * ROWS + 64 * 8;
    return all * (8 * width + 6 * wide) + QUERIES * (8 * width + 4 * wide) + 6 * AT_ONCE * QUERIES * PANEL + 64 * 16;
}

}  // namespace

#endif
