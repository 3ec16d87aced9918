// Operations of training on the processor, each in one pass over its numbers: what PyTorch does in several, beside which
// it is tested (model/kernels/cpu.py). Rows are split among threads; the result does not depend on their number.

#include "numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

// ---- attention -------------------------------------------------------------------------------------------------------

constexpr int64_t AT_ONCE = 32;  // numbers that the widest loops take; what is left over goes one by one, and slowly

// Row r of matrix n is query `start + r mod block`, which sees keys first[n / heads, query] … query.
struct Mask {
    const int64_t *first;
    int64_t heads, tokens, start, block, rows, keys;
};

struct Seen {
    int64_t from, count, padded;  // padded: a multiple of AT_ONCE, if the row is long enough

    INLINE_MEMBER Seen(const Mask &mask, int64_t matrix, int64_t row) {
        const int64_t query = mask.start + int32_t(row) % int32_t(mask.block);
        from = mask.first[matrix / mask.heads * mask.tokens + query];
        count = query + 1 - from;
        padded = std::min((count + AT_ONCE - 1) / AT_ONCE * AT_ONCE, mask.keys - from);
    }
};

template <class T> INLINE void softmax(void *raw, const Mask &mask, float scale, int64_t begin, int64_t end) {
    std::vector<float> room(mask.keys);
    float *const values = room.data();
    for (int64_t matrix = begin; matrix < end; matrix++) {
        for (int64_t row = 0; row < mask.rows; row++) {
            const Seen seen(mask, matrix, row);
            T *const whole = (T *)raw + (matrix * mask.rows + row) * mask.keys, *const at = whole + seen.from;
            int32_t highest = INT32_MIN;
            float sum = 0;
#pragma omp simd
            for (int64_t k = 0; k < seen.padded; k++) values[k] = load(at + k) * scale;
            std::fill(values + seen.count, values + seen.padded, -INFINITY);
#pragma omp simd reduction(max : highest)
            for (int64_t k = 0; k < seen.padded; k++) {
                const int32_t order = ordered(values[k]);
                highest = order > highest ? order : highest;
            }
            const float most = unordered(highest);
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < seen.padded; k++) {
                values[k] = exponential(values[k] - most);
                sum += values[k];
            }
            const float factor = 1.0f / sum;
#pragma omp simd
            for (int64_t k = 0; k < seen.padded; k++) store(at + k, values[k] * factor);
            std::memset((void *)whole, 0, seen.from * sizeof(T));
            std::memset((void *)(at + seen.count), 0, (mask.keys - seen.from - seen.count) * sizeof(T));
        }
    }
}

template <class T>
INLINE void softmax_grads(const void *weights, void *grads, const Mask &mask, float scale, int64_t begin,
                           int64_t end) {
    for (int64_t matrix = begin; matrix < end; matrix++) {
        for (int64_t row = 0; row < mask.rows; row++) {
            const Seen seen(mask, matrix, row);
            const int64_t place = (matrix * mask.rows + row) * mask.keys;
            const T *const p = (const T *)weights + place + seen.from;
            T *const whole = (T *)grads + place, *const d = whole + seen.from;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < seen.padded; k++) sum += load(p + k) * load(d + k);  // p is 0 where it is not seen
#pragma omp simd
            for (int64_t k = 0; k < seen.padded; k++) store(d + k, load(p + k) * (load(d + k) - sum) * scale);
            std::memset((void *)whole, 0, seen.from * sizeof(T));
            std::memset((void *)(d + seen.count), 0, (mask.keys - seen.from - seen.count) * sizeof(T));
        }
    }
}

BOTH(softmax, (void *scores, const Mask &mask, float scale, int64_t begin, int64_t end),
     (scores, mask, scale, begin, end))
BOTH(softmax_grads,
     (const void *weights, void *grads, const Mask &mask, float scale, int64_t begin, int64_t end),
     (weights, grads, mask, scale, begin, end))

// ---- positions -------------------------------------------------------------------------------------------------------

// Strides, in numbers, of [batch, head, token, …]; the last dimension is contiguous.
struct Layout {
    int64_t batch, head, token;
};
struct Rope {
    int64_t heads, tokens, half;
    Layout from, to;
    const float *cosine, *sine;
    int64_t angle_batch, angle_token;
    float sign;  // −1 turns back
};

template <class T> INLINE void rotate(const void *raw, void *into, const Rope &t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t b = row / (t.heads * t.tokens), n = row / t.tokens % t.heads, k = row % t.tokens;
        const T *const x = (const T *)raw + b * t.from.batch + n * t.from.head + k * t.from.token;
        T *const y = (T *)into + b * t.to.batch + n * t.to.head + k * t.to.token;
        const float *const c = t.cosine + b * t.angle_batch + k * t.angle_token;
        const float *const s = t.sine + b * t.angle_batch + k * t.angle_token;
#pragma omp simd
        for (int64_t e = 0; e < t.half; e++) {
            const float one = load(x + e), two = load(x + e + t.half), sine = s[e] * t.sign;
            store(y + e, one * c[e] - two * sine);
            store(y + e + t.half, two * c[e] + one * sine);
        }
    }
}

BOTH(rotate, (const void *x, void *y, const Rope &t, int64_t begin, int64_t end), (x, y, t, begin, end))

// ---- feed-forward ----------------------------------------------------------------------------------------------------

template <class T> INLINE void swiglu(const void *g, const void *u, void *y, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float gate = load((const T *)g + i);
        store((T *)y + i, gate * sigmoid(gate) * load((const T *)u + i));
    }
}

template <class T>
INLINE void swiglu_grads(const void *g, const void *u, const void *dy, void *dg, void *du, int64_t begin,
                          int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float gate = load((const T *)g + i), up = load((const T *)u + i), grad = load((const T *)dy + i);
        const float open = sigmoid(gate);
        store((T *)dg + i, grad * up * open * (1.0f + gate * (1.0f - open)));
        store((T *)du + i, grad * gate * open);
    }
}

// gelu(x) by tanh is x σ(2 c (x + a x³)), because tanh(z) = 2 σ(2 z) − 1.
constexpr float GELU_C = 2 * 0.7978845608f, GELU_A = 0.044715f;

template <class T> INLINE void gelu(const void *x, void *y, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float value = load((const T *)x + i);
        store((T *)y + i, value * sigmoid(GELU_C * (value + GELU_A * value * value * value)));
    }
}

template <class T> INLINE void gelu_grads(const void *x, const void *dy, void *dx, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float value = load((const T *)x + i), square = value * value;
        const float open = sigmoid(GELU_C * (value + GELU_A * value * square));
        const float inner = value * (1.0f - open) * GELU_C * (1.0f + 3 * GELU_A * square);
        store((T *)dx + i, load((const T *)dy + i) * open * (1.0f + inner));
    }
}

BOTH(swiglu, (const void *g, const void *u, void *y, int64_t begin, int64_t end), (g, u, y, begin, end))
BOTH(swiglu_grads, (const void *g, const void *u, const void *dy, void *dg, void *du, int64_t begin, int64_t end),
     (g, u, dy, dg, du, begin, end))
BOTH(gelu, (const void *x, void *y, int64_t begin, int64_t end), (x, y, begin, end))
BOTH(gelu_grads, (const void *x, const void *dy, void *dx, int64_t begin, int64_t end), (x, dy, dx, begin, end))

// ---- loss ------------------------------------------------------------------------------------------------------------

// totals[n] = log Σ exp(scores[n]). Scores become `share` times the gradients of total − scores[n, target] + z · total², if
// wanted.
template <class T>
INLINE void entropy(void *scores, int64_t stride, const int64_t *targets, float *totals, int64_t vocabulary, float z,
                    float share, bool grads, int64_t begin, int64_t end) {
    std::vector<float> room(vocabulary);
    float *const values = room.data();
    for (int64_t row = begin; row < end; row++) {
        T *const at = (T *)scores + row * stride;
        int32_t highest = INT32_MIN;
        float sum = 0;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < vocabulary; i++) {
            const int32_t order = ordered(load(at + i));
            highest = order > highest ? order : highest;
        }
        const float most = unordered(highest);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < vocabulary; i++) {
            values[i] = exponential(load(at + i) - most);
            sum += values[i];
        }
        const float whole = most + std::log(sum);
        totals[row] = whole;
        if (!grads) continue;
        const float factor = share * (1.0f + 2 * z * whole) / sum;
        const float right = values[targets[row]] * factor - share;
#pragma omp simd
        for (int64_t i = 0; i < vocabulary; i++) store(at + i, values[i] * factor);
        store(at + targets[row], right);
    }
}

BOTH(entropy,
     (void *scores, int64_t stride, const int64_t *targets, float *totals, int64_t vocabulary, float z, float share,
      bool grads, int64_t begin, int64_t end),
     (scores, stride, targets, totals, vocabulary, z, share, grads, begin, end))

// ---- biases ----------------------------------------------------------------------------------------------------------

constexpr int64_t COLUMNS = 256, ROWS = 64;  // of a part whose sums stay in the nearest cache; summed up without a stop

template <class T> INLINE void columns(const void *x, float *sums, int64_t rows, int64_t width, int64_t begin, int64_t end) {
    float part[COLUMNS];
    for (int64_t left = begin; left < end; left += COLUMNS) {
        const int64_t wide = std::min(COLUMNS, end - left);
        std::fill(sums + left, sums + left + wide, 0.0f);
        for (int64_t top = 0; top < rows; top += ROWS) {
            std::fill(part, part + wide, 0.0f);
            for (int64_t row = top; row < std::min(top + ROWS, rows); row++) {
                const T *const from = (const T *)x + row * width + left;
#pragma omp simd
                for (int64_t i = 0; i < wide; i++) part[i] += load(from + i);
            }
#pragma omp simd
            for (int64_t i = 0; i < wide; i++) sums[left + i] += part[i];
        }
    }
}

BOTH(columns, (const void *x, float *sums, int64_t rows, int64_t width, int64_t begin, int64_t end),
     (x, sums, rows, width, begin, end))

}  // namespace

extern "C" {

// scores [matrices, rows, keys] become weights. first [matrices / heads, tokens]: the first key that a query sees.
// A row is a query, from `start` on, again and again every `block` rows: those of one group of heads after the other.
void bloomery_softmax(int64_t kind, void *scores, const int64_t *first, int64_t matrices, int64_t heads, int64_t tokens,
                      int64_t start, int64_t block, int64_t rows, int64_t keys, float scale, int64_t threads) {
    const Mask mask{first, heads, tokens, start, block, rows, keys};
    split(matrices, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, softmax, scores, mask, scale, begin, end);
    });
}

// gradients of the weights become gradients of the scores, which stood before `scale`.
void bloomery_softmax_grads(int64_t kind, const void *weights, void *grads, const int64_t *first, int64_t matrices,
                             int64_t heads, int64_t tokens, int64_t start, int64_t block, int64_t rows, int64_t keys,
                             float scale, int64_t threads) {
    const Mask mask{first, heads, tokens, start, block, rows, keys};
    split(matrices, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, softmax_grads, weights, grads, mask, scale, begin, end);
    });
}

// strides: of x (batch, head, token), of y (the same), of cosine and sine (batch, token)
void bloomery_rotate(int64_t kind, const void *x, void *y, const float *cosine, const float *sine, int64_t batch,
                   int64_t heads, int64_t tokens, int64_t width, const int64_t *strides, float sign, int64_t threads) {
    const Rope t{heads,  tokens, width / 2,  {strides[0], strides[1], strides[2]}, {strides[3], strides[4], strides[5]},
                 cosine, sine,   strides[6], strides[7],                           sign};
    split(batch * heads * tokens, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, rotate, x, y, t, begin, end);
    });
}

void bloomery_swiglu(int64_t kind, const void *gate, const void *up, void *y, int64_t count, int64_t threads) {
    split(count, threads, [&](int64_t begin, int64_t end, int64_t) { EITHER(kind, swiglu, gate, up, y, begin, end); });
}

void bloomery_swiglu_grads(int64_t kind, const void *gate, const void *up, const void *dy, void *dgate, void *dup,
                            int64_t count, int64_t threads) {
    split(count, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, swiglu_grads, gate, up, dy, dgate, dup, begin, end);
    });
}

void bloomery_gelu(int64_t kind, const void *x, void *y, int64_t count, int64_t threads) {
    split(count, threads, [&](int64_t begin, int64_t end, int64_t) { EITHER(kind, gelu, x, y, begin, end); });
}

void bloomery_gelu_grads(int64_t kind, const void *x, const void *dy, void *dx, int64_t count, int64_t threads) {
    split(count, threads, [&](int64_t begin, int64_t end, int64_t) { EITHER(kind, gelu_grads, x, dy, dx, begin, end); });
}

// Rows of scores lie `stride` numbers apart.
void bloomery_entropy(int64_t kind, void *scores, int64_t stride, const int64_t *targets, float *totals, int64_t rows,
                      int64_t vocabulary, float z, float share, int64_t grads, int64_t threads) {
    split(rows, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, entropy, scores, stride, targets, totals, vocabulary, z, share, grads != 0, begin, end);
    });
}

// sums[i] = Σ x[n, i] over rows n, of x [rows, width].
void bloomery_columns(int64_t kind, const void *x, float *sums, int64_t rows, int64_t width, int64_t threads) {
    split((width + COLUMNS - 1) / COLUMNS, threads, [&](int64_t begin, int64_t end, int64_t) {
        EITHER(kind, columns, x, sums, rows, width, begin * COLUMNS, std::min(end * COLUMNS, width));
    });
}
}
