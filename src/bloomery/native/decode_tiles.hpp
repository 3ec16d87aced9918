// Included once for each width of vectors, in a namespace of its own: LANES numbers are computed together. A panel of 16
// rows takes 16 / LANES vectors. VNNI: one instruction adds the products of four codes, with the same result.

constexpr int64_t SPLIT = PANEL / LANES;          // vectors of a panel
constexpr int64_t TOKENS = LANES == 16 ? 8 : 4;   // that are multiplied at once
constexpr int64_t PANELS = 4;                     // of which are computed together where there is one token
constexpr int QUERIES = LANES == 4 ? 2 : LANES == 8 ? 6 : 12;  // that share what is read of a key or value
constexpr int ANSWERS = LANES == 16 ? 24 : 12;                 // vectors of them that are computed together

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));  // sums, or pairs of 16 bits

INLINE Floats read(const float *at) {
    Floats value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
INLINE Floats floats(Words bits) {
    Floats value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

#if LANES == 16
INLINE Floats read(const Bfloat16 *at) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
}
INLINE Floats read(const Float16 *at) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE Floats read(const int8_t *at) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
#ifdef VNNI
INLINE Ints plus_quads(Ints sum, Ints w, Ints x) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
#else
INLINE Ints plus_pairs(Ints sum, Ints a, Ints b) { return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#endif
INLINE Words words(const uint8_t *at) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)); }
#elif LANES == 8
INLINE Floats read(const Bfloat16 *at) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
}
INLINE Floats read(const Float16 *at) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE Floats read(const int8_t *at) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}
INLINE Ints plus_pairs(Ints sum, Ints a, Ints b) { return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE Words words(const uint8_t *at) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)); }
#else
INLINE Floats read(const Bfloat16 *at) {
    Floats value;
    for (int i = 0; i < LANES; i++) value[i] = load(at + i);
    return value;
}
INLINE Floats read(const Float16 *at) {
    Floats value;
    for (int i = 0; i < LANES; i++) value[i] = load(at + i);
    return value;
}
INLINE Floats read(const int8_t *at) {
    Floats value;
    for (int i = 0; i < LANES; i++) value[i] = float(at[i]);
    return value;
}
INLINE Ints plus_pairs(Ints sum, Ints a, Ints b) {
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}
INLINE Words words(const uint8_t *at) {
    Words value;
    for (int i = 0; i < LANES; i++) value[i] = at[i];
    return value;
}
#endif
INLINE Ints read(const int32_t *at) {
    Ints value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
INLINE Floats converted(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

// As exponential() of one number.
INLINE Floats exponential(Floats x) {
    const Floats least = Floats{} - 60.0f, most = Floats{} + 60.0f;
    x = x < least ? least : x;
    x = most < x ? most : x;
    const Floats n = x * 1.44269504f + 12582912.0f - 12582912.0f;
    const Floats rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    return TAYLOR(rest) * floats((Words)((__builtin_convertvector(n, Ints) + 127) << 23));
}
INLINE Ints counted(int64_t first) {
    Ints value;
    for (int i = 0; i < LANES; i++) value[i] = int32_t(first) + i;
    return value;
}

// Adds the products of four codes without a sign, and of eight in 4 bits, with those of activations, of which `number`
// fours or eights lie before.
#ifdef VNNI
INLINE Ints plus_fours(Ints sum, Ints w, const int32_t *codes, int64_t number) { return plus_quads(sum, w, Ints{} + codes[number]); }
INLINE Ints plus_eights(Ints sum, Ints w, const int32_t *codes, int64_t number) {
    sum = plus_quads(sum, w & 0x0F0F0F0F, Ints{} + codes[2 * number]);
    return plus_quads(sum, w >> 4 & 0x0F0F0F0F, Ints{} + codes[2 * number + 1]);
}
#else
INLINE Ints plus_fours(Ints sum, Ints w, const int32_t *codes, int64_t number) {
    sum = plus_pairs(sum, w & 0x00FF00FF, Ints{} + codes[2 * number]);
    return plus_pairs(sum, w >> 8 & 0x00FF00FF, Ints{} + codes[2 * number + 1]);
}
INLINE Ints plus_eights(Ints sum, Ints w, const int32_t *codes, int64_t number) {
    for (int j = 0; j < 4; j++) sum = plus_pairs(sum, w >> (4 * j) & 0x000F000F, Ints{} + codes[4 * number + j]);
    return sum;
}
#endif

// Weights come from memory while those before them are multiplied: each step of a tile asks for `step` bytes from `at` on.
struct Ahead {
    const char *at;
    int64_t step;

    INLINE_MEMBER void ask(int64_t number) const { __builtin_prefetch(at + number * step, 0, 2); }
};

// The sums of P panels and T tokens, and where they go.
template <int P, int T> struct Sums {
    Floats at[P][SPLIT][T] = {};

    INLINE_MEMBER void write(const Matrix &m, int64_t first, float *const *y) const {
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++)
                for (int t = 0; t < T; t++) {
                    const int64_t row = (first + p) * PANEL + s * LANES;
                    const Floats sum = m.format == IN_INT8 ? at[p][s][t] * read((const float *)m.scales + row) : at[p][s][t];
                    std::memcpy(y[t] + row, &sum, sizeof sum);
                }
    }
};

// Weights that are numbers by themselves.
template <class W, int P, int T>
INLINE void plain_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y, Ahead ahead) {
    Sums<P, T> sums;
    const W *const panel = (const W *)m.codes + first * PANEL * m.width;
    for (int64_t k = 0; k < m.width; k++) {
        ahead.ask(k);
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++) {
                const Floats w = read(panel + (p * m.width + k) * PANEL + s * LANES);
                for (int t = 0; t < T; t++) sums.at[p][s][t] += w * x[t][k];
            }
    }
    sums.write(m, first, y);
}

// int8: each 32 bits have 4 codes of a row, without a sign. They are multiplied by the rounded numbers behind x, and what
// was added to them is in what a sum begins with: see rounded().
template <int P, int T>
INLINE void int8_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y, Ahead ahead) {
    Sums<P, T> sums;
    const uint8_t *codes = (const uint8_t *)m.codes + first * PANEL * m.width;
    for (int64_t block = 0; block < m.width / BLOCK; block++, codes += PANEL * BLOCK) {
        Ints part[P][SPLIT][T];
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++)
                for (int t = 0; t < T; t++) part[p][s][t] = Ints{} + rounded_starts(x[t], m.width)[block];
        for (int64_t four = 0; four < BLOCK / 4; four++) {
            ahead.ask(block * BLOCK / 4 + four);
            for (int p = 0; p < P; p++)
                for (int s = 0; s < SPLIT; s++) {
                    const Ints w = read((const int32_t *)(codes + p * PANEL * m.width) + four * PANEL + s * LANES);
                    for (int t = 0; t < T; t++)
                        part[p][s][t] = plus_fours(part[p][s][t], w, rounded_codes(x[t], m.width), block * BLOCK / 4 + four);
                }
        }
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++)
                for (int t = 0; t < T; t++) sums.at[p][s][t] += converted(part[p][s][t]) * rounded_scales(x[t], m.width)[block];
    }
    sums.write(m, first, y);
}

// int4: each 32 bits have 8 codes of a row. w = factor · code + added. Behind x are the sums of its groups, too.
template <int P, int T>
INLINE void int4_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y, Ahead ahead) {
    const int64_t groups = m.width / GROUP, each = PANEL * GROUP / 8;
    Sums<P, T> sums;
    const int32_t *codes = (const int32_t *)m.codes + first * groups * each;
    const Float16 *scales = (const Float16 *)m.scales + first * groups * 2 * PANEL;
    for (int64_t group = 0; group < groups; group++, codes += each, scales += 2 * PANEL) {
        Ints part[P][SPLIT][T] = {};
        for (int64_t word = 0; word < GROUP / 8; word++) {
            ahead.ask(group * GROUP / 8 + word);
            for (int p = 0; p < P; p++)
                for (int s = 0; s < SPLIT; s++) {
                    const Ints eight = read(codes + p * groups * each + word * PANEL + s * LANES);
                    for (int t = 0; t < T; t++)
                        part[p][s][t] = plus_eights(part[p][s][t], eight, rounded_codes(x[t], m.width), group * GROUP / 8 + word);
                }
        }
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++) {
                const Float16 *const at = scales + p * groups * 2 * PANEL + s * LANES;
                const Floats factor = read(at), added = read(at + PANEL);
                for (int t = 0; t < T; t++) {
                    const float *const scale = rounded_scales(x[t], m.width), *const sum = scale + m.width / BLOCK;
                    sums.at[p][s][t] += converted(part[p][s][t]) * (factor * scale[group / 2]) + added * sum[group];
                }
            }
    }
    sums.write(m, first, y);
}

// The numbers of NF4, of the lowest 4 bits of each code.
INLINE Floats nf4(Words code) {
#if LANES == 16
    return (Floats)_mm512_permutexvar_ps((__m512i)code, _mm512_load_ps(NF4));
#elif LANES == 8
    const __m256 first = _mm256_permutevar8x32_ps(_mm256_load_ps(NF4), (__m256i)code);
    const __m256 last = _mm256_permutevar8x32_ps(_mm256_load_ps(NF4 + 8), (__m256i)code);
    return (Floats)_mm256_blendv_ps(first, last, (__m256)(code << 28));
#else
    Floats value;
    for (int i = 0; i < LANES; i++) value[i] = NF4[code[i] & 15];
    return value;
#endif
}

// NF4: two codes a byte, k and k + 32 of a block.
template <int P, int T>
INLINE void nf4_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y) {
    const int64_t blocks = m.width / BLOCK;
    Sums<P, T> sums;
    const uint8_t *codes = (const uint8_t *)m.codes + first * blocks * PANEL * BLOCK / 2;
    const Bfloat16 *scales = (const Bfloat16 *)m.scales + first * blocks * PANEL;
    for (int64_t block = 0; block < blocks; block++, codes += PANEL * BLOCK / 2, scales += PANEL)
        for (int s = 0; s < SPLIT; s++) {
            Floats part[P][T] = {};
            for (int64_t k = 0; k < BLOCK / 2; k++)
                for (int p = 0; p < P; p++) {
                    const Words pair = words(codes + p * blocks * PANEL * BLOCK / 2 + k * PANEL + s * LANES);
                    const Floats low = nf4(pair), high = nf4(pair >> 4);
                    for (int t = 0; t < T; t++) {
                        part[p][t] += low * x[t][block * BLOCK + k];
                        part[p][t] += high * x[t][block * BLOCK + k + BLOCK / 2];
                    }
                }
            for (int p = 0; p < P; p++) {
                const Floats factor = read(scales + p * blocks * PANEL + s * LANES);
                for (int t = 0; t < T; t++) sums.at[p][s][t] += part[p][t] * factor;
            }
        }
    sums.write(m, first, y);
}

template <int P, int T>
INLINE void tile(const Matrix &m, int64_t first, const float *const *x, float *const *y, Ahead ahead) {
    switch (m.format) {
        case IN_INT8: return int8_tile<P, T>(m, first, x, y, ahead);
        case IN_INT4: return int4_tile<P, T>(m, first, x, y, ahead);
#ifndef VNNI
        case IN_FLOAT32: return plain_tile<float, P, T>(m, first, x, y, ahead);
        case IN_BFLOAT16: return plain_tile<Bfloat16, P, T>(m, first, x, y, ahead);
        default: return nf4_tile<P, T>(m, first, x, y);
#endif
    }
}

// Bytes of the codes of a panel, and steps of a tile.
INLINE int64_t panel_bytes(const Matrix &m) {
    const int64_t bits[] = {32, 16, 8, 4, 4};
    return PANEL * m.width * bits[m.format] / 8;
}
INLINE int64_t panel_steps(const Matrix &m) {
    return m.format == IN_INT8 ? m.width / 4 : m.format == IN_INT4 ? m.width / 8 : m.width;
}

// Panels begin … end of y for all tokens. Rows of x are x_stride numbers apart, and rows of y y_stride.
void panels(const Matrix &m, int64_t begin, int64_t end, int64_t tokens, const float *x, int64_t x_stride, float *y,
            int64_t y_stride) {
    const float *from[TOKENS];
    float *to[TOKENS];
    const int64_t bytes = panel_bytes(m), most = tokens == 1 ? PANELS : tokens == 2 ? 2 : 1;
    for (int64_t panel = begin, together; panel < end; panel += together) {
        together = panel + most <= end ? most : 1;
        const char *const next = (const char *)m.codes + (panel + together) * bytes;
        for (int64_t token = 0, count; token < tokens; token += count) {
            count = token + TOKENS <= tokens ? TOKENS : token + 4 <= tokens ? 4 : token + 2 <= tokens ? 2 : 1;
            for (int64_t t = 0; t < count; t++) from[t] = x + (token + t) * x_stride, to[t] = y + (token + t) * y_stride;
            const int64_t share = bytes * together * count / tokens;  // of what comes next
            const Ahead ahead{next + bytes * together * token / tokens, share / panel_steps(m)};
            if (count == TOKENS) tile<1, TOKENS>(m, panel, from, to, ahead);
            else if (count == 4) tile<1, 4>(m, panel, from, to, ahead);
            else if (count == 2 && together == 2) tile<2, 2>(m, panel, from, to, ahead);
            else if (count == 2) tile<1, 2>(m, panel, from, to, ahead);
            else if (together == PANELS) tile<PANELS, 1>(m, panel, from, to, ahead);
            else tile<1, 1>(m, panel, from, to, ahead);
        }
        if (m.bias)
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t r = panel * PANEL; r < std::min((panel + together) * PANEL, m.rows); r++)
                    y[t * y_stride + r] += m.bias[r];
    }
}

#ifndef VNNI
// Adds weight · value over the slots begin … end of a page to Q answers, W vectors of each from e on.
template <class C, int Q, int W>
INLINE void mix_some(const C *values, int64_t head, const float *weights, int64_t begin, int64_t end, int64_t e, const Query *of) {
    Floats sums[Q][W];
    for (int g = 0; g < Q; g++)
        for (int w = 0; w < W; w++) sums[g][w] = read(of[g].y + e + w * LANES);
    for (int64_t slot = begin; slot < end; slot++) {
        Floats numbers[W];
        for (int w = 0; w < W; w++) numbers[w] = read(values + slot * head + e + w * LANES);
        for (int g = 0; g < Q; g++)
            for (int w = 0; w < W; w++) sums[g][w] += numbers[w] * weights[g * PAGE + slot];
    }
    for (int g = 0; g < Q; g++)
        for (int w = 0; w < W; w++) std::memcpy(of[g].y + e + w * LANES, &sums[g][w], sizeof(Floats));
}

template <class C, int Q>
INLINE void mix(const C *values, int64_t head, const float *weights, int64_t begin, int64_t end, const Query *of) {
    constexpr int W = Q * 4 <= ANSWERS ? 4 : 2;
    if (begin >= end) return;
    int64_t e = 0;
    for (; e + W * LANES <= head; e += W * LANES) mix_some<C, Q, W>(values, head, weights, begin, end, e, of);
    for (; e + LANES <= head; e += LANES) mix_some<C, Q, 1>(values, head, weights, begin, end, e, of);
}

INLINE int64_t slot_of(int64_t position, int64_t page) { return std::min(std::max<int64_t>(position - page, 0), PAGE); }

// What Q queries find. Their key head is the same, and their tokens are of one sequence. A query's sums have the same
// order whatever others are answered with it. room: E · Q numbers, and Q for each position from the first page on.
template <class C, int Q>
INLINE void attend_together(const Model &m, const Step &s, const Pages &pages, int64_t kv_head, const Query *of, float *room) {
    const int64_t E = m.head;
    int64_t earliest = of[0].begin, begin = earliest, last = of[0].position, end = last;  // seen by any, and by all
    for (int g = 1; g < Q; g++) {
        earliest = std::min(earliest, of[g].begin), begin = std::max(begin, of[g].begin);
        last = std::max(last, of[g].position), end = std::min(end, of[g].position);
    }
    end = begin > end ? begin = last + 1 : end + 1;
    const int64_t first = earliest / PAGE * PAGE, stop = (last / PAGE + 1) * PAGE;
    float *const q = room, *const weights = room + E * Q, totals[Q];
    for (int64_t e = 0; e < E; e++)
        for (int g = 0; g < Q; g++) q[e * Q + g] = of[g].q[e];
    const Floats nothing = Floats{} - INFINITY;
    Floats most[Q];
    for (int g = 0; g < Q; g++) most[g] = nothing;
    for (int64_t page = first; page < stop; page += PAGE) {
        const C *const keys = (const C *)s.keys + pages.at(page, kv_head);
        const float *const scales = is_coded<C> ? s.scales + pages.scales_at(page, kv_head) : nullptr;
        for (int64_t slot = 0; slot < PAGE; slot += 2 * LANES) {
            Floats sums[Q][2];
            for (int g = 0; g < Q; g++) sums[g][0] = sums[g][1] = Floats{};
            for (int64_t e = 0; e < E; e++) {
                const Floats one = read(keys + e * PAGE + slot), two = read(keys + e * PAGE + slot + LANES);
                for (int g = 0; g < Q; g++) sums[g][0] += one * q[e * Q + g], sums[g][1] += two * q[e * Q + g];
            }
            for (int i = 0; i < 2; i++) {
                const int64_t at = slot + i * LANES;
                const Ints other = counted(page + at);
                for (int g = 0; g < Q; g++) {
                    const int32_t position = int32_t(of[g].position);
                    Floats score = sums[g][i] * m.scale;
                    if (is_coded<C>) score *= read(scales + at);
                    if (m.slopes) score -= m.slopes[of[g].head] * converted(position - other);
                    score = (other < Ints{} + int32_t(of[g].begin)) | (other > Ints{} + position) ? nothing : score;
                    most[g] = most[g] < score ? score : most[g];
                    std::memcpy(weights + (page - first) * Q + g * PAGE + at, &score, sizeof score);
                }
            }
        }
    }
    for (int g = 0; g < Q; g++) {
        float highest = -INFINITY, lanes[16];
        for (int i = 0; i < LANES; i++) highest = std::max(highest, most[g][i]);
        Floats total[16 / LANES];
        for (int i = 0; i < 16 / LANES; i++) total[i] = Floats{};
        for (int64_t page = first; page < stop; page += PAGE) {
            float *const here = weights + (page - first) * Q + g * PAGE;
            for (int64_t i = 0; i < PAGE; i += 16)
                for (int j = 0; j < 16 / LANES; j++) {
                    const Floats score = read(here + i + j * LANES);
                    const Floats weight = score == nothing ? Floats{} : exponential(score - highest);
                    std::memcpy(here + i + j * LANES, &weight, sizeof weight);
                    total[j] += weight;
                }
            for (int64_t i = 0; is_coded<C> && i < PAGE; i++) here[i] *= s.scales[pages.scales_at(page, kv_head) + PAGE + i];
        }
        std::memcpy(lanes, total, sizeof lanes);
        totals[g] = lanes_sum(lanes);
        std::memset(of[g].y, 0, E * sizeof(float));
    }
    for (int64_t page = first; page < stop; page += PAGE) {
        const C *const values = (const C *)s.values + pages.at(page, kv_head);
        const float *const here = weights + (page - first) * Q;
        const int64_t low = slot_of(begin, page), high = std::max(low, slot_of(end, page));
        for (int g = 0; g < Q; g++) {
            const int64_t until = slot_of(of[g].position + 1, page);
            mix<C, 1>(values, E, here + g * PAGE, slot_of(of[g].begin, page), std::min(low, until), of + g);
        }
        mix<C, Q>(values, E, here, low, high, of);
        for (int g = 0; g < Q; g++) mix<C, 1>(values, E, here + g * PAGE, high, slot_of(of[g].position + 1, page), of + g);
    }
    for (int g = 0; g < Q; g++) {
        int64_t e = 0;
        for (; e + LANES <= E; e += LANES) {
            const Floats mean = read(of[g].y + e) / totals[g];
            std::memcpy(of[g].y + e, &mean, sizeof mean);
        }
        for (; e < E; e++) {
            float sum = 0;
            for (int64_t other = of[g].begin; other <= of[g].position; other++)
                sum += weights[(other / PAGE * PAGE - first) * Q + g * PAGE + other % PAGE] *
                       load((const C *)s.values + pages.at(other, kv_head) + other % PAGE * E + e);
            of[g].y[e] = sum / totals[g];
        }
    }
}

template <class C>
INLINE void attend_by(const Model &m, const Layer &layer, const Step &s, const Pages &p, const Run &tokens, int64_t kv_head,
                      const float *q, int64_t q_stride, float *y, int64_t y_stride, float *room) {
    const int64_t heads = m.heads / m.kv_heads, all = tokens.count * heads;
    for (int64_t i = 0, count; i < all; i += count) {
        count = std::min<int64_t>(all - i, QUERIES);
        count = count >= 12 ? 12 : count >= 6 ? 6 : count;
        count = count == 5 ? 4 : count;
        Query of[QUERIES];
        for (int64_t g = 0; g < count; g++) {
            const int64_t token = (i + g) / heads, h = kv_head * heads + (i + g) % heads;
            const int64_t position = s.position[tokens.first + token];
            const int64_t begin = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
            of[g] = {q + token * q_stride + h * m.head, y + token * y_stride + h * m.head, h, begin, position};
        }
        if (QUERIES >= 12 && count == 12) attend_together<C, std::min(QUERIES, 12)>(m, s, p, kv_head, of, room);
        else if (QUERIES >= 6 && count == 6) attend_together<C, std::min(QUERIES, 6)>(m, s, p, kv_head, of, room);
        else if (QUERIES >= 4 && count == 4) attend_together<C, std::min(QUERIES, 4)>(m, s, p, kv_head, of, room);
        else if (QUERIES >= 3 && count == 3) attend_together<C, std::min(QUERIES, 3)>(m, s, p, kv_head, of, room);
        else if (count == 2) attend_together<C, 2>(m, s, p, kv_head, of, room);
        else attend_together<C, 1>(m, s, p, kv_head, of, room);
    }
}

// What the query heads of one key head find for tokens that follow each other; q and y are of the first.
void attend(const Model &m, const Layer &l, const Step &s, const Pages &p, const Run &tokens, int64_t kv_head, const float *q,
            int64_t q_stride, float *y, int64_t y_stride, float *room) {
    switch (m.cache_format) {
        case IN_FLOAT32: return attend_by<float>(m, l, s, p, tokens, kv_head, q, q_stride, y, y_stride, room);
        case IN_BFLOAT16: return attend_by<Bfloat16>(m, l, s, p, tokens, kv_head, q, q_stride, y, y_stride, room);
        default: return attend_by<int8_t>(m, l, s, p, tokens, kv_head, q, q_stride, y, y_stride, room);
    }
}
#endif
