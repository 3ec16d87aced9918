// One step of a decoder-only model for the next tokens of several sequences, from weights in float32, bfloat16, int8,
// int4 or NF4 (generate/decoder.py packs them). The numbers of a token depend on its own sequence alone: not on the
// tokens that are computed with it, on threads, or on how a prompt was cut.
//
// Weights are decoded in registers and multiplied in float32. Matrices lie in panels of 16 rows: for each k, the 16
// numbers of its rows are together. Each output is one sum in the order of k, whatever else is computed beside it.
//
// Keys and values lie in pages of PAGE tokens. A page has them for all layers and heads: keys [width, PAGE], values
// [PAGE, width].

#include "numbers.hpp"

#if !defined(PLAIN) && defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTORS
#include <immintrin.h>
#endif

#include <atomic>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t PANEL = 16, GROUP = 32, BLOCK = 64, PAGE = 32;

struct Float16 {
    uint16_t bits;
};

// The exponents of float16 are 112 below those of float32; a product moves them, of denormal numbers too.
INLINE float load(const Float16 *at) {
    const uint32_t most = uint32_t(at->bits & 0x7FFF) << 13;
    float value;
    std::memcpy(&value, &most, 4);
    value *= 5192296858534827628530496329220096.0f;  // 2**112
    return at->bits & 0x8000 ? -value : value;
}

// The numbers of NF4, of model/quantize.py.
alignas(64) constexpr float NF4[16] = {-1.0f, -0.696192801f, -0.525072932f, -0.394917428f,
                                        -0.284441322f, -0.1847734f, -0.0910499766f, 0.0f,
                                        0.0795803145f, 0.160930142f, 0.246112257f, 0.337915123f,
                                        0.44070974f, 0.562616885f, 0.722956657f, 1.0f};

}  // namespace

extern "C" {

enum Format : int64_t { IN_FLOAT32, IN_BFLOAT16, IN_INT8, IN_INT4, IN_NF4 };

// y = W x + bias. scales: of rows (int8), of groups by rows (int4: float16 [panel, group, 2, 16], the factor and what is
// added), of blocks by rows (NF4: bfloat16 [panel, block, 16]).
struct Matrix {
    int64_t format, rows, width;
    const void *codes, *scales;
    const float *bias;
};

// kind: 0 none, 1 RMSNorm, 2 LayerNorm. gain and bias may be null.
struct Norm {
    int64_t kind;
    const float *gain, *bias;
};

struct Layer {
    Norm attention_norm, attention_post, mlp_norm, mlp_post, q_norm, k_norm;
    Matrix qkv, out, up, down;       // up: with the gate before it where there is one
    int64_t window, mlp, gated;      // window 0: none. mlp: see activated()
    const float *cosines, *sines;    // [position, rotary / 2]; null: no rotation
};

struct Model {
    int64_t width, layers, heads, kv_heads, head, rotary, inner, norm_over_width, parallel, cache_format;
    float eps, scale;
    const float *slopes;  // of ALiBi, of each head; null: none
    const Layer *layer;
    Norm norm;
    Matrix logits;
};

// N tokens. pages [sequences, pages_each] are those of each sequence, in order. wanted [outputs]: the tokens whose
// logits are asked for. x [N, width] are the embeddings, which are overwritten.
struct Step {
    int64_t tokens, outputs, pages_each, threads;
    const int64_t *sequence, *position, *wanted;
    const int32_t *pages;
    void *keys, *values;
    float *x, *logits;
    float *room;
};
}

namespace {

// --- products, by the vectors of this processor ----------------------------------------------------------------------

namespace plain {
#define LANES 4
#include "decode_tiles.hpp"
#undef LANES
}  // namespace plain

#ifdef VECTORS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace v3 {
#define LANES 8
#include "decode_tiles.hpp"
#undef LANES
}  // namespace v3
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
namespace v4 {
#define LANES 16
#include "decode_tiles.hpp"
#undef LANES
}  // namespace v4
#pragma GCC pop_options
#endif

using Panels = void (*)(const Matrix &, int64_t, int64_t, int64_t, const float *, int64_t, float *, int64_t);

// Of at most so many lanes.
Panels panels_here(int64_t lanes) {
#ifdef VECTORS
    __builtin_cpu_init();
    if (lanes >= 16 && __builtin_cpu_supports("x86-64-v4")) return v4::panels;
    if (lanes >= 8 && __builtin_cpu_supports("x86-64-v3")) return v3::panels;
#endif
    return plain::panels;
}

Panels panels = panels_here(16);

// --- norms, activations, attention -----------------------------------------------------------------------------------

// Sums of 16 lanes, which are then added in a fixed order.
INLINE float lanes_sum(const float *lanes) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += lanes[i];
    return sum;
}

void sum_groups(float *x, int64_t width) {
    for (int64_t group = 0; group < width / GROUP; group++) {
        float sum = 0;
        for (int64_t k = 0; k < GROUP; k++) sum += x[group * GROUP + k];
        x[width + group] = sum;
    }
}

FOR_EVERY_CPU void normed(const Norm &norm, float eps, const float *x, float *y, int64_t width) {
    float lanes[16] = {}, mean = 0;
    if (norm.kind == 2) {
        for (int64_t i = 0; i < width; i++) lanes[i % 16] += x[i];
        mean = lanes_sum(lanes) / float(width);
        std::memset(lanes, 0, sizeof lanes);
    }
    const int64_t whole = width / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (int64_t i = whole; i < width; i++) lanes[i - whole] += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1.0f / std::sqrt(lanes_sum(lanes) / float(width) + eps);
    for (int64_t i = 0; i < width; i++) {
        const float value = (x[i] - mean) * inverse * (norm.gain ? norm.gain[i] : 1.0f);
        y[i] = norm.bias ? value + norm.bias[i] : value;
    }
}

// kind: 0 SiLU, 1 GELU, 2 GELU by tanh, 3 ReLU². With a gate, which lies before: activated(gate) · up.
INLINE float activated(float x, int64_t kind) {
    switch (kind) {
        case 0: return x * sigmoid(x);
        case 1: return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
        case 2: {
            const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
            return 0.5f * x * (1.0f + (2.0f * sigmoid(2.0f * inner) - 1.0f));
        }
        default: return x > 0 ? x * x : 0.0f;
    }
}

FOR_EVERY_CPU void activate(const Layer &layer, const float *up, float *y, int64_t inner) {
    if (layer.mlp == 0 && layer.gated) {
        for (int64_t i = 0; i < inner; i++) y[i] = up[i] * sigmoid(up[i]) * up[inner + i];
        return;
    }
    for (int64_t i = 0; i < inner; i++)
        y[i] = layer.gated ? activated(up[i], layer.mlp) * up[inner + i] : activated(up[i], layer.mlp);
}

// Halves of a head are pairs: j and j + rotary / 2.
INLINE void rotate(float *head, const float *cosine, const float *sine, int64_t half) {
    for (int64_t j = 0; j < half; j++) {
        const float a = head[j], b = head[j + half];
        head[j] = a * cosine[j] - b * sine[j];
        head[j + half] = b * cosine[j] + a * sine[j];
    }
}

struct Pages {
    const int32_t *of_sequence;
    int64_t layers, layer, kv_heads, head, size;

    INLINE_MEMBER int64_t at(int64_t token, int64_t kv_head) const {
        return ((int64_t(of_sequence[token / PAGE]) * layers + layer) * kv_heads + kv_head) * size;
    }
};

// Queries, keys and values of a token: norms, rotation, and into the cache.
template <class C>
INLINE void placed(const Model &m, const Layer &layer, const Step &s, const Pages &pages, int64_t token, float *qkv) {
    const int64_t position = s.position[token], slot = position % PAGE;
    float *const q = qkv, *const k = q + m.heads * m.head, *const v = k + m.kv_heads * m.head;
    if (layer.q_norm.kind) {
        if (m.norm_over_width) {
            normed(layer.q_norm, m.eps, q, q, m.heads * m.head);
            normed(layer.k_norm, m.eps, k, k, m.kv_heads * m.head);
        } else {
            for (int64_t h = 0; h < m.heads; h++) normed(layer.q_norm, m.eps, q + h * m.head, q + h * m.head, m.head);
            for (int64_t h = 0; h < m.kv_heads; h++) normed(layer.k_norm, m.eps, k + h * m.head, k + h * m.head, m.head);
        }
    }
    if (layer.cosines) {
        const int64_t half = m.rotary / 2;
        const float *const cosine = layer.cosines + position * half, *const sine = layer.sines + position * half;
        for (int64_t h = 0; h < m.heads + m.kv_heads; h++) rotate(q + h * m.head, cosine, sine, half);
    }
    for (int64_t h = 0; h < m.kv_heads; h++) {
        C *const keys = (C *)s.keys + pages.at(position, h), *const values = (C *)s.values + pages.at(position, h);
        for (int64_t e = 0; e < m.head; e++) {
            store(keys + e * PAGE + slot, k[h * m.head + e]);
            store(values + slot * m.head + e, v[h * m.head + e]);
        }
    }
}

// What the query heads of one key head find for a token.
template <class C>
INLINE void attend(const Model &m, const Layer &layer, const Step &s, const Pages &pages, int64_t token, int64_t kv_head,
                   const float *q, float *y, float *scores) {
    const int64_t position = s.position[token], group = m.heads / m.kv_heads, E = m.head;
    const int64_t begin = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
    const int64_t page = begin / PAGE * PAGE, padded = (position / PAGE + 1) * PAGE - page;
    for (int64_t g = 0; g < group; g++) {
        const int64_t h = kv_head * group + g;
        const float *const query = q + h * E;
        float most = -INFINITY;
        for (int64_t first = page; first <= position; first += PAGE) {
            const C *const keys = (const C *)s.keys + pages.at(first, kv_head);
            float sums[PAGE] = {};
            for (int64_t e = 0; e < E; e++)
                for (int64_t i = 0; i < PAGE; i++) sums[i] += query[e] * load(keys + e * PAGE + i);
            for (int64_t i = 0; i < PAGE; i++) {
                const int64_t other = first + i;
                float score = sums[i] * m.scale;
                if (m.slopes) score -= m.slopes[h] * float(position - other);
                score = other < begin || other > position ? -INFINITY : score;
                scores[first - page + i] = score;
                most = std::max(most, score);
            }
        }
        float total = 0, lanes[16] = {};
        for (int64_t i = 0; i < padded; i += 16)
            for (int64_t j = 0; j < 16; j++) {
                const float score = scores[i + j], weight = score == -INFINITY ? 0.0f : exponential(score - most);
                scores[i + j] = weight;
                lanes[j] += weight;
            }
        total = lanes_sum(lanes);
        float *const into = y + h * E;
        std::memset(into, 0, E * sizeof(float));
        for (int64_t other = begin; other <= position; other++) {
            const C *const value = (const C *)s.values + pages.at(other, kv_head) + other % PAGE * E;
            const float weight = scores[other - page];
            for (int64_t e = 0; e < E; e++) into[e] += weight * load(value + e);
        }
        for (int64_t e = 0; e < E; e++) into[e] /= total;
    }
}

FOR_EVERY_CPU void place_token(const Model &m, const Layer &l, const Step &s, const Pages &p, int64_t token, float *qkv) {
    m.cache_format ? placed<Bfloat16>(m, l, s, p, token, qkv) : placed<float>(m, l, s, p, token, qkv);
}
FOR_EVERY_CPU void attend_token(const Model &m, const Layer &l, const Step &s, const Pages &p, int64_t token, int64_t head,
                                const float *q, float *y, float *scores) {
    m.cache_format ? attend<Bfloat16>(m, l, s, p, token, head, q, y, scores)
                   : attend<float>(m, l, s, p, token, head, q, y, scores);
}

// --- a step ----------------------------------------------------------------------------------------------------------

// Threads wait for each other here, without the operating system as long as that is short.
struct Meeting {
    std::atomic<int64_t> arrived{0}, round{0};
    int64_t threads = 1;  // that really run

    void wait() {
        if (threads == 1) return;
        const int64_t now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.fetch_add(1, std::memory_order_acq_rel);
            return;
        }
        for (int64_t spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            if (spins > 4096) std::this_thread::yield();
    }
};

INLINE int64_t padded(int64_t rows, int64_t unit) { return (rows + unit - 1) / unit * unit; }

struct Sizes {
    int64_t x, qkv, heads, up, inner, scores;

    Sizes(const Model &m, int64_t longest)
        : x(vector(m.width)), qkv(padded((m.heads + 2 * m.kv_heads) * m.head, PANEL)),
          heads(vector(m.heads * m.head)), up(0), inner(vector(m.inner)), scores(padded(longest, PAGE)) {
        for (int64_t l = 0; l < m.layers; l++) up = std::max(up, padded(m.layer[l].up.rows, PANEL));
    }
    static int64_t vector(int64_t width) { return padded(width, BLOCK) + padded(padded(width, BLOCK) / GROUP, PANEL); }
    int64_t each() const { return 3 * x + qkv + heads + up + inner; }
};

void work(const Model &m, const Step &s, const Sizes &size, Meeting &meeting, int64_t thread) {
    const int64_t N = s.tokens;
    float *const read_from = s.room, *const added = read_from + N * size.x, *const entry = added + N * size.x;
    float *const qkv = entry + N * size.x, *const found = qkv + N * size.qkv, *const up = found + N * size.heads;
    float *const inner = up + N * size.up, *const scores = inner + N * size.inner + thread * size.scores;
    const auto share = [&](int64_t count, const auto &each) {
        for (int64_t i = count * thread / meeting.threads; i < count * (thread + 1) / meeting.threads; i++) each(i);
        meeting.wait();
    };
    const auto times = [&](const Matrix &matrix, int64_t tokens, float *x, int64_t x_stride, float *y, int64_t y_stride) {
        if (matrix.format == IN_INT4) share(tokens, [&](int64_t t) { sum_groups(x + t * x_stride, matrix.width); });
        const int64_t all = (matrix.rows + PANEL - 1) / PANEL;
        panels(matrix, all * thread / meeting.threads, all * (thread + 1) / meeting.threads, tokens, x, x_stride, y, y_stride);
        meeting.wait();
    };
    const auto copy = [&](float *to, const float *from) { std::memcpy(to, from, m.width * sizeof(float)); };
    const auto before = [&](const Norm &norm, int64_t t, const float *x) {
        float *const to = read_from + t * size.x;
        norm.kind ? normed(norm, m.eps, x, to, m.width) : copy(to, x);
    };
    const auto add = [&](const Norm &norm, int64_t t) {
        float *const x = s.x + t * m.width, *const part = added + t * size.x;
        if (norm.kind) normed(norm, m.eps, part, part, m.width);
        for (int64_t i = 0; i < m.width; i++) x[i] += part[i];
    };
    for (int64_t l = 0; l < m.layers; l++) {
        const Layer &layer = m.layer[l];
        share(N, [&](int64_t t) {
            if (l) add(m.layer[l - 1].mlp_post, t);
            if (m.parallel) copy(entry + t * size.x, s.x + t * m.width);
            before(layer.attention_norm, t, s.x + t * m.width);
        });
        times(layer.qkv, N, read_from, size.x, qkv, size.qkv);
        const auto pages = [&](int64_t t) {
            return Pages{s.pages + s.sequence[t] * s.pages_each, m.layers, l, m.kv_heads, m.head, m.head * PAGE};
        };
        share(N, [&](int64_t t) { place_token(m, layer, s, pages(t), t, qkv + t * size.qkv); });
        share(N * m.kv_heads, [&](int64_t task) {
            const int64_t t = task / m.kv_heads;
            attend_token(m, layer, s, pages(t), t, task % m.kv_heads, qkv + t * size.qkv, found + t * size.heads, scores);
        });
        times(layer.out, N, found, size.heads, added, size.x);
        share(N, [&](int64_t t) {
            add(layer.attention_post, t);
            before(layer.mlp_norm, t, m.parallel ? entry + t * size.x : s.x + t * m.width);
        });
        times(layer.up, N, read_from, size.x, up, size.up);
        share(N, [&](int64_t t) { activate(layer, up + t * size.up, inner + t * size.inner, m.inner); });
        times(layer.down, N, inner, size.inner, added, size.x);
    }
    share(s.outputs, [&](int64_t i) {
        const int64_t t = s.wanted[i];
        add(m.layer[m.layers - 1].mlp_post, t);
        before(m.norm, t, s.x + t * m.width);
        copy(entry + i * size.x, read_from + t * size.x);
    });
    times(m.logits, s.outputs, entry, size.x, s.logits, padded(m.logits.rows, PANEL));
}

// `given` numbers of each row; the panel's width is filled up with zeros.
template <class T>
void transposed(const T *from, T *to, int64_t panel, int64_t rows, int64_t given, int64_t width) {
    T *const into = to + panel * PANEL * width;
    for (int64_t k = 0; k < width; k += 32)
        for (int64_t r = 0; r < PANEL; r++) {
            const int64_t row = panel * PANEL + r, until = std::min(k + 32, width);
            const T *const numbers = from + row * given;
            for (int64_t i = k; i < until; i++) into[i * PANEL + r] = row < rows && i < given ? numbers[i] : T(0);
        }
}

}  // namespace

extern "C" {

// Numbers of float32 that a step of so many tokens needs as room; the room begins with zeros. longest: positions.
int64_t bloomery_decode_room(const Model *m, int64_t tokens, int64_t threads, int64_t longest) {
    const Sizes size(*m, longest);
    return tokens * size.each() + threads * size.scores;
}

// Vectors of at most so many numbers from now on: 4, 8 or 16. Gives what this processor then uses.
int64_t bloomery_decode_lanes(int64_t most) {
    panels = panels_here(most);
#ifdef VECTORS
    return panels == v4::panels ? 16 : panels == v3::panels ? 8 : 4;
#else
    return 4;
#endif
}

void bloomery_decode(const Model *m, const Step *s, int64_t longest) {
    const Sizes size(*m, longest);
    Meeting meeting;
#ifdef _OPENMP
    if (s->threads > 1) {
#pragma omp parallel num_threads(s->threads)
        {
#pragma omp single
            meeting.threads = omp_get_num_threads();
            work(*m, *s, size, meeting, omp_get_thread_num());
        }
        return;
    }
#endif
    work(*m, *s, size, meeting, 0);
}

// Rows [panels * 16, width] of numbers of `size` bytes into panels: [panels, width, 16]. Rows from `rows` on are zeros.
void bloomery_panels(const void *from, void *to, int64_t size, int64_t rows, int64_t given, int64_t width,
                     int64_t threads) {
    split((rows + PANEL - 1) / PANEL, threads, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t panel = begin; panel < end; panel++)
            size == 1   ? transposed((const uint8_t *)from, (uint8_t *)to, panel, rows, given, width)
            : size == 2 ? transposed((const uint16_t *)from, (uint16_t *)to, panel, rows, given, width)
                        : transposed((const uint32_t *)from, (uint32_t *)to, panel, rows, given, width);
    });
}
}
