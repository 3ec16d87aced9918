// One step of a decoder-only model for the next tokens of several sequences, from weights in float32, bfloat16, int8,
// int4 or NF4 (generate/decoder.py packs them). The numbers of a token depend on its own sequence alone: not on the
// tokens that are computed with it, on threads, or on how a prompt was cut.
//
// Matrices lie in panels of 16 rows: for each k, the 16 numbers of its rows are together. Weights in int8 and int4 are
// multiplied as integers by activations that are rounded to 8 bits; others are decoded in registers and multiplied in
// float32. Each output is one sum in the order of k, whatever else is computed beside it.
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
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t PANEL = 16, GROUP = 32, BLOCK = 64, PAGE = 32;
constexpr int32_t INT8_ADDED = 128;  // to the codes of int8, which are kept without a sign
constexpr int64_t TOGETHER = 12;  // tokens of a sequence, or queries, at most, that are answered together

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

INLINE float load(const int8_t *at) { return *at; }
INLINE void store(int8_t *at, float value) { *at = int8_t(int32_t(value + 12582912.0f) - 12582912); }  // to the nearest

// The numbers of NF4, of model/quantize.py.
alignas(64) constexpr float NF4[16] = {-1.0f, -0.696192801f, -0.525072932f, -0.394917428f,
                                        -0.284441322f, -0.1847734f, -0.0910499766f, 0.0f,
                                        0.0795803145f, 0.160930142f, 0.246112257f, 0.337915123f,
                                        0.44070974f, 0.562616885f, 0.722956657f, 1.0f};

}  // namespace

extern "C" {

enum Format : int64_t { IN_FLOAT32, IN_BFLOAT16, IN_INT8, IN_INT4, IN_NF4, IN_FLOAT16 };  // the last of embeddings alone

// y = W x + bias. codes of int8: [panel, k / 4, 16, 4]. scales: of rows (int8), of groups by rows (int4: float16 [panel, group, 2, 16], the factor and what is
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
    int64_t embed_format;
    const void *embed;       // [ids, width]
    const float *positions;  // that were learned [position, width]; null: none
    float embed_scale;
    const Layer *layer;
    Norm norm;
    Matrix logits;
};

// What an adapter adds to some outputs of a matrix: B A x. a [rank, width], and b [rank, rows] is B by columns, with its
// scale. `begin` is the first of the outputs. rank 0: nothing.
struct Change {
    int64_t rank, width, rows, begin;
    const float *a, *b;
};

// Of a layer: q, k and v, then out, gate and up, and down.
struct LayerChanges {
    Change qkv[3], out[1], up[2], down[1];
};

// N tokens. pages [sequences, pages_each] are those of each sequence, in order. wanted [outputs]: the tokens whose
// logits are asked for. x [N, width]: room for the residual stream.
struct Step {
    int64_t tokens, outputs, pages_each, threads;
    const int64_t *ids, *sequence, *position, *wanted;
    const int32_t *pages;
    void *keys, *values;
    float *scales;  // of keys and values in int8: [page, layer, head, 2, PAGE]
    float *x, *logits;
    float *room;
    const LayerChanges *const *adapters;  // of each token, all layers of its adapter; null: none. Null where no token has one
};
}

namespace {

// --- activations in 8 bits -------------------------------------------------------------------------------------------

// Behind the numbers of a vector lie: their codes from −127 to 127, in the order in which they are multiplied; what 1
// stands for in each block; and of int8 what a block's sum begins with, of int4 the sums of groups. Codes are in 8 bits
// where one instruction multiplies four of them (quads), else in 16.
INLINE const int32_t *rounded_codes(const float *x, int64_t width) { return (const int32_t *)(x + width); }
INLINE const float *rounded_scales(const float *x, int64_t width) { return x + width + width / 2; }
INLINE const int32_t *rounded_starts(const float *x, int64_t width) {
    return (const int32_t *)(rounded_scales(x, width) + width / BLOCK);
}

// The largest number without its sign; NaN where there is any.
INLINE float largest(const float *numbers, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, numbers + i, 4);
        most = std::max(most, bits & 0x7FFFFFFF);  // integers in the order of their floats, NaN above all
    }
    float value;
    std::memcpy(&value, &most, 4);
    return value;
}

// Codes of int4 have 8 of a row in 32 bits: a byte those of k and k + 16. In pairs, 4 bits of the lower and of the upper
// half are multiplied together, and of int8 every other byte.
FOR_EVERY_CPU void rounded(float *x, int64_t width, bool in_groups, bool in_quads) {
    int16_t *const pairs = (int16_t *)(x + width);
    int8_t *const quads = (int8_t *)(x + width);
    float *const scales = x + width + width / 2, *const sums = scales + width / BLOCK;
    for (int64_t block = 0; block < width / BLOCK; block++) {
        const float *const from = x + block * BLOCK;
        int32_t code[BLOCK], sum[2] = {};
        const float most = largest(from, BLOCK), inverse = most < 1e-30f ? 0.0f : 127 / most;
        const float scale = scales[block] = most / 127;
        for (int64_t k = 0; k < BLOCK; k++) {
            const float shifted = from[k] * inverse + 12582912.0f;  // its lowest bits are those of the nearest integer
            std::memcpy(code + k, &shifted, 4);
            code[k] -= 0x4B400000;
        }
        for (int64_t k = 0; k < BLOCK; k++) sum[k / GROUP] += code[k];
        if (in_groups) {
            for (int64_t group = 0; group < 2; group++) sums[block * 2 + group] = float(sum[group]) * scale;
        } else {
            const int32_t start = -INT8_ADDED * (sum[0] + sum[1]);
            std::memcpy(sums + block, &start, 4);
        }
        for (int64_t four = 0; four < BLOCK; four += 4) {  // k, k + 1, k + 2, k + 3
            const int64_t word = four % GROUP / 8 * 4, group = four / GROUP * GROUP;
            const int32_t *const of = in_groups ? code + group + word + four % 8 / 4 * 16 : code + four;
            if (in_quads) {
                for (int64_t k = 0; k < 4; k++) quads[block * BLOCK + four + k] = int8_t(of[k]);
                continue;
            }
            for (int64_t k = 0; k < 4; k++) {
                const int64_t at = in_groups ? four / 8 * 8 + k % 2 * 4 + four % 8 / 4 * 2 + k / 2 : four + k % 2 * 2 + k / 2;
                pairs[block * BLOCK + at] = int16_t(of[k]);
            }
        }
    }
}

struct Pages {
    const int32_t *of_sequence;
    int64_t layers, layer, kv_heads, head, size;

    INLINE_MEMBER int64_t at(int64_t token, int64_t kv_head) const {
        return ((int64_t(of_sequence[token / PAGE]) * layers + layer) * kv_heads + kv_head) * size;
    }
    INLINE_MEMBER int64_t scales_at(int64_t token, int64_t kv_head) const { return at(token, kv_head) / size * 2 * PAGE; }
};

// Sums of 16 lanes, which are then added in a fixed order.
INLINE float lanes_sum(const float *lanes) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += lanes[i];
    return sum;
}

template <class C> constexpr bool is_coded = sizeof(C) == 1;

// Tokens of a step that follow each other in one sequence.
struct Run {
    int64_t first, count;
};

// It sees the positions begin … position, and its answer goes to y.
struct Query {
    const float *q;
    float *y;
    int64_t head, begin, position;
};

// --- products and attention, by the vectors of this processor ---------------------------------------------------------

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
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni,prefer-vector-width=512")
namespace v4_vnni {
#define LANES 16
#define VNNI
#include "decode_tiles.hpp"
#undef VNNI
#undef LANES
}  // namespace v4_vnni
#pragma GCC pop_options
#endif

struct Kernels {
    int64_t lanes;
    decltype(plain::panels) *panels, *coded_panels;  // coded: int8 and int4
    decltype(plain::attend) *attend;
};

// Of at most so many lanes; 17: of 16 and with VNNI.
Kernels kernels_here(int64_t lanes) {
#ifdef VECTORS
    __builtin_cpu_init();
    const bool v4 = __builtin_cpu_supports("x86-64-v4");
    if (lanes > 16 && v4 && __builtin_cpu_supports("avx512vnni")) return {17, v4::panels, v4_vnni::panels, v4::attend};
    if (lanes >= 16 && v4) return {16, v4::panels, v4::panels, v4::attend};
    if (lanes >= 8 && __builtin_cpu_supports("x86-64-v3")) return {8, v3::panels, v3::panels, v3::attend};
#endif
    return {4, plain::panels, plain::panels, plain::attend};
}

Kernels kernels = kernels_here(17);

// --- norms, activations, keys and values -----------------------------------------------------------------------------------

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

FOR_EVERY_CPU void add_change(const Change &change, const float *x, float *y) {
    const int64_t whole = change.width / 16 * 16;
    for (int64_t r = 0; r < change.rank; r++) {
        const float *const a = change.a + r * change.width, *const b = change.b + r * change.rows;
        float lanes[16] = {};
        for (int64_t k = 0; k < whole; k += 16)
            for (int j = 0; j < 16; j++) lanes[j] += a[k + j] * x[k + j];
        for (int64_t k = whole; k < change.width; k++) lanes[k - whole] += a[k] * x[k];
        const float low = lanes_sum(lanes);
        for (int64_t i = 0; i < change.rows; i++) y[change.begin + i] += low * b[i];
    }
}

template <class T> INLINE void embedded(const Model &m, int64_t id, const float *position, float *x) {
    const T *const row = (const T *)m.embed + id * m.width;
    for (int64_t i = 0; i < m.width; i++) x[i] = (load(row + i) + (position ? position[i] : 0.0f)) * m.embed_scale;
}

FOR_EVERY_CPU void embed(const Model &m, int64_t id, int64_t position, float *x) {
    const float *const learned = m.positions ? m.positions + position * m.width : nullptr;
    switch (m.embed_format) {
        case IN_FLOAT32: return embedded<float>(m, id, learned, x);
        case IN_BFLOAT16: return embedded<Bfloat16>(m, id, learned, x);
        default: return embedded<Float16>(m, id, learned, x);
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
        case 3: return x > 0 ? x * x : 0.0f;
        default: return NAN;  // a number of generate/decoder.py that is missing here
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

// What numbers are multiplied by to be codes of int8, and what a code stands for.
INLINE float coded_by(const float *numbers, int64_t count, float *scale) {
    const float most = largest(numbers, count);
    *scale = most / 127;
    return most < 1e-30f ? 0.0f : 127 / most;
}

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
        const float *const key = k + h * m.head, *const value = v + h * m.head;
        float by_key = 1, by_value = 1;
        if (is_coded<C>) {
            float *const scales = s.scales + pages.scales_at(position, h);
            by_key = coded_by(key, m.head, scales + slot), by_value = coded_by(value, m.head, scales + PAGE + slot);
        }
        for (int64_t e = 0; e < m.head; e++) {
            store(keys + e * PAGE + slot, key[e] * by_key);
            store(values + slot * m.head + e, value[e] * by_value);
        }
    }
}

FOR_EVERY_CPU void place_token(const Model &m, const Layer &l, const Step &s, const Pages &p, int64_t token, float *qkv) {
    switch (m.cache_format) {
        case IN_FLOAT32: return placed<float>(m, l, s, p, token, qkv);
        case IN_BFLOAT16: return placed<Bfloat16>(m, l, s, p, token, qkv);
        default: return placed<int8_t>(m, l, s, p, token, qkv);
    }
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

    Sizes(const Model &m, int64_t tokens, int64_t longest)
        : x(vector(m.width)), qkv(padded((m.heads + 2 * m.kv_heads) * m.head, PANEL)),
          heads(vector(m.heads * m.head)), up(0), inner(vector(m.inner)),
          scores(std::min(TOGETHER, tokens * (m.heads / m.kv_heads)) * (m.head + padded(longest, PAGE))) {
        for (int64_t l = 0; l < m.layers; l++) up = std::max(up, padded(m.layer[l].up.rows, PANEL));
    }
    static int64_t vector(int64_t width) { return 2 * padded(width, BLOCK); }  // with what rounded() puts behind it
    int64_t each() const { return 3 * x + qkv + heads + up + inner; }
};

// At most TOGETHER tokens each.
std::vector<Run> runs_of(const Step &s) {
    std::vector<Run> runs;
    for (int64_t t = 0; t < s.tokens; t++) {
        const bool follows = t && s.sequence[t] == s.sequence[t - 1] && s.position[t] == s.position[t - 1] + 1;
        if (follows && runs.back().count < TOGETHER) runs.back().count++;
        else runs.push_back({t, 1});
    }
    return runs;
}

void work(const Model &m, const Step &s, const std::vector<Run> &runs, const Sizes &size, Meeting &meeting, int64_t thread) {
    const int64_t N = s.tokens;
    float *const read_from = s.room, *const added = read_from + N * size.x, *const entry = added + N * size.x;
    float *const qkv = entry + N * size.x, *const found = qkv + N * size.qkv, *const up = found + N * size.heads;
    float *const inner = up + N * size.up, *const scores = inner + N * size.inner + thread * size.scores;
    const auto share = [&](int64_t count, const auto &each) {
        for (int64_t i = count * thread / meeting.threads; i < count * (thread + 1) / meeting.threads; i++) each(i);
        meeting.wait();
    };
    const auto times = [&](const Matrix &matrix, int64_t tokens, float *x, int64_t x_stride, float *y, int64_t y_stride) {
        const bool coded = matrix.format == IN_INT8 || matrix.format == IN_INT4;
        if (coded) share(tokens, [&](int64_t t) { rounded(x + t * x_stride, matrix.width, matrix.format == IN_INT4, kernels.lanes > 16); });
        const int64_t all = (matrix.rows + PANEL - 1) / PANEL;
        const int64_t begin = all * thread / meeting.threads, end = all * (thread + 1) / meeting.threads;
        (coded ? kernels.coded_panels : kernels.panels)(matrix, begin, end, tokens, x, x_stride, y, y_stride);
        meeting.wait();
    };
    // Each token adds the changes of its own adapter to its row, so the row does not depend on the others.
    const auto adapt = [&](int64_t l, const auto &part, const float *x, int64_t x_stride, float *y, int64_t y_stride) {
        if (!s.adapters) return;
        share(N, [&](int64_t t) {
            if (!s.adapters[t]) return;
            for (const Change &change : s.adapters[t][l].*part) add_change(change, x + t * x_stride, y + t * y_stride);
        });
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
            l ? add(m.layer[l - 1].mlp_post, t) : embed(m, s.ids[t], s.position[t], s.x + t * m.width);
            if (m.parallel) copy(entry + t * size.x, s.x + t * m.width);
            before(layer.attention_norm, t, s.x + t * m.width);
        });
        times(layer.qkv, N, read_from, size.x, qkv, size.qkv);
        adapt(l, &LayerChanges::qkv, read_from, size.x, qkv, size.qkv);
        const auto pages = [&](int64_t t) {
            return Pages{s.pages + s.sequence[t] * s.pages_each, m.layers, l, m.kv_heads, m.head, m.head * PAGE};
        };
        share(N, [&](int64_t t) { place_token(m, layer, s, pages(t), t, qkv + t * size.qkv); });
        for (int64_t task = thread; task < int64_t(runs.size()) * m.kv_heads; task += meeting.threads) {
            const Run &run = runs[task / m.kv_heads];
            kernels.attend(m, layer, s, pages(run.first), run, task % m.kv_heads, qkv + run.first * size.qkv, size.qkv,
                           found + run.first * size.heads, size.heads, scores);
        }
        meeting.wait();
        times(layer.out, N, found, size.heads, added, size.x);
        adapt(l, &LayerChanges::out, found, size.heads, added, size.x);
        share(N, [&](int64_t t) {
            add(layer.attention_post, t);
            before(layer.mlp_norm, t, m.parallel ? entry + t * size.x : s.x + t * m.width);
        });
        times(layer.up, N, read_from, size.x, up, size.up);
        adapt(l, &LayerChanges::up, read_from, size.x, up, size.up);
        share(N, [&](int64_t t) { activate(layer, up + t * size.up, inner + t * size.inner, m.inner); });
        times(layer.down, N, inner, size.inner, added, size.x);
        adapt(l, &LayerChanges::down, inner, size.inner, added, size.x);
    }
    share(s.outputs, [&](int64_t i) {
        const int64_t t = s.wanted[i];
        add(m.layer[m.layers - 1].mlp_post, t);
        before(m.norm, t, s.x + t * m.width);
        copy(entry + i * size.x, read_from + t * size.x);
    });
    times(m.logits, s.outputs, entry, size.x, s.logits, padded(m.logits.rows, PANEL));
}

// Whether none is infinite or NaN: those have all bits of the exponent.
FOR_EVERY_CPU bool all_finite(const float *numbers, int64_t count) {
    int32_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, numbers + i, 4);
        bad |= (bits & 0x7F800000) == 0x7F800000;
    }
    return !bad;
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
    const Sizes size(*m, tokens, longest);
    return tokens * size.each() + threads * size.scores;
}

// Vectors of at most so many numbers from now on: 4, 8 or 16. Gives what this processor then uses.
int64_t bloomery_decode_lanes(int64_t most) {
    kernels = kernels_here(most);
    return kernels.lanes;
}

// Gives 1 where all logits are finite, else 0.
int64_t bloomery_decode(const Model *m, const Step *s, int64_t longest) {
    const Sizes size(*m, s->tokens, longest);
    const std::vector<Run> runs = runs_of(*s);
    Meeting meeting;
#ifdef _OPENMP
    if (s->threads > 1) {
#pragma omp parallel num_threads(s->threads)
        {
#pragma omp single
            meeting.threads = omp_get_num_threads();
            work(*m, *s, runs, size, meeting, omp_get_thread_num());
        }
    } else
#endif
        work(*m, *s, runs, size, meeting, 0);
    return all_finite(s->logits, s->outputs * padded(m->logits.rows, PANEL));
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
