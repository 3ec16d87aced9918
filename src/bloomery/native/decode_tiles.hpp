// Included once for each width of vectors, in a namespace of its own: LANES numbers are computed together. A panel of 16
// rows takes 16 / LANES vectors.

constexpr int64_t SPLIT = PANEL / LANES;          // vectors of a panel
constexpr int64_t TOKENS = LANES == 16 ? 8 : 4;   // that are multiplied at once
constexpr int64_t PANELS = 4;                     // of which are computed together where there is one token
constexpr int QUERIES = LANES == 4 ? 2 : LANES == 8 ? 3 : 4;  // heads that share what is read of a key or value

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
INLINE Ints pairs(const int8_t *at) { return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at)); }
INLINE Ints multiplied(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE Words words(const uint8_t *at) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)); }
#elif LANES == 8
INLINE Floats read(const Bfloat16 *at) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
}
INLINE Floats read(const Float16 *at) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE Floats read(const int8_t *at) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}
INLINE Ints pairs(const int8_t *at) { return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)); }
INLINE Ints multiplied(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
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
INLINE Ints pairs(const int8_t *at) {
    Ints value;
    for (int i = 0; i < LANES; i++) value[i] = int32_t(uint32_t(at[2 * i]) & 0xFFFF) | int32_t(at[2 * i + 1]) * 65536;
    return value;
}
INLINE Ints multiplied(Ints a, Ints b) { return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16); }
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

// int8: codes in pairs of k, which are multiplied by the rounded numbers behind x: see rounded().
template <int P, int T>
INLINE void int8_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y, Ahead ahead) {
    Sums<P, T> sums;
    const int8_t *codes = (const int8_t *)m.codes + first * PANEL * m.width;
    for (int64_t block = 0; block < m.width / BLOCK; block++, codes += PANEL * BLOCK) {
        Ints part[P][SPLIT][T] = {};
        for (int64_t k = 0; k < BLOCK / 2; k++) {
            ahead.ask(block * BLOCK / 2 + k);
            for (int p = 0; p < P; p++)
                for (int s = 0; s < SPLIT; s++) {
                    const Ints w = pairs(codes + p * PANEL * m.width + (k * PANEL + s * LANES) * 2);
                    for (int t = 0; t < T; t++) part[p][s][t] += multiplied(w, Ints{} + rounded_pairs(x[t], m.width)[block * BLOCK / 2 + k]);
                }
        }
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++)
                for (int t = 0; t < T; t++) sums.at[p][s][t] += converted(part[p][s][t]) * rounded_scales(x[t], m.width)[block];
    }
    sums.write(m, first, y);
}

// int4: each 32 bits have 8 codes of a row, of which 4 bits of the lower and of the upper half are multiplied as a pair.
// w = factor · code + added. Behind x are the sums of its groups, too.
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
                    for (int j = 0; j < 4; j++) {
                        const Ints w = eight >> (4 * j) & 0x000F000F;
                        for (int t = 0; t < T; t++)
                            part[p][s][t] += multiplied(w, Ints{} + rounded_pairs(x[t], m.width)[group * GROUP / 2 + word * 4 + j]);
                    }
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
        case IN_FLOAT32: return plain_tile<float, P, T>(m, first, x, y, ahead);
        case IN_BFLOAT16: return plain_tile<Bfloat16, P, T>(m, first, x, y, ahead);
        case IN_INT8: return int8_tile<P, T>(m, first, x, y, ahead);
        case IN_INT4: return int4_tile<P, T>(m, first, x, y, ahead);
        default: return nf4_tile<P, T>(m, first, x, y);
    }
}

// Bytes of the codes of a panel, and steps of a tile.
INLINE int64_t panel_bytes(const Matrix &m) {
    const int64_t bits[] = {32, 16, 8, 4, 4};
    return PANEL * m.width * bits[m.format] / 8;
}
INLINE int64_t panel_steps(const Matrix &m) {
    return m.format == IN_INT8 ? m.width / 2 : m.format == IN_INT4 ? m.width / 8 : m.width;
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

// The sums of weight · value over the tokens begin … end, of Q query heads and W vectors of their numbers.
template <class C, int Q, int W>
INLINE void mix(const Step &s, const Pages &pages, int64_t kv_head, int64_t begin, int64_t end, int64_t e,
                const float *weights, int64_t stride, const float *totals, float *y) {
    Floats sums[Q][W];
    for (int g = 0; g < Q; g++)
        for (int w = 0; w < W; w++) sums[g][w] = Floats{};
    for (int64_t other = begin; other < end;) {
        const C *value = (const C *)s.values + pages.at(other, kv_head) + other % PAGE * pages.head + e;
        for (const int64_t stop = std::min(end, other / PAGE * PAGE + PAGE); other < stop; other++, value += pages.head)
            for (int w = 0; w < W; w++) {
                const Floats numbers = read(value + w * LANES);
                for (int g = 0; g < Q; g++) sums[g][w] += numbers * weights[g * stride + other];
            }
    }
    for (int g = 0; g < Q; g++)
        for (int w = 0; w < W; w++) {
            const Floats mean = sums[g][w] / totals[g];
            std::memcpy(y + g * pages.head + e + w * LANES, &mean, sizeof mean);
        }
}

// What Q query heads of one key head, from head h on, find for a token. weights: room for Q · stride numbers.
template <class C, int Q>
INLINE void attend_heads(const Model &m, const Layer &layer, const Step &s, const Pages &pages, int64_t token, int64_t h,
                         const float *q, float *y, float *room, int64_t stride) {
    const int64_t position = s.position[token], kv_head = h / (m.heads / m.kv_heads), E = m.head;
    const int64_t begin = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
    const int64_t first = begin / PAGE * PAGE, end = (position / PAGE + 1) * PAGE;
    float *const weights = room - first, totals[Q];
    const Floats nothing = Floats{} - INFINITY;
    Floats most[Q];
    q += h * E, y += h * E;
    for (int g = 0; g < Q; g++) most[g] = nothing;
    for (int64_t page = first; page < end; page += PAGE) {
        const C *const keys = (const C *)s.keys + pages.at(page, kv_head);
        const float *const scales = is_coded<C> ? s.scales + pages.scales_at(page, kv_head) : nullptr;
        Floats sums[Q][PAGE / LANES];
        for (int g = 0; g < Q; g++)
            for (int i = 0; i < PAGE / LANES; i++) sums[g][i] = Floats{};
        for (int64_t e = 0; e < E; e++)
            for (int i = 0; i < PAGE / LANES; i++) {
                const Floats numbers = read(keys + e * PAGE + i * LANES);
                for (int g = 0; g < Q; g++) sums[g][i] += numbers * q[g * E + e];
            }
        for (int i = 0; i < PAGE / LANES; i++) {
            const Ints other = counted(page + i * LANES);
            const Ints hidden = (other < Ints{} + int32_t(begin)) | (other > Ints{} + int32_t(position));
            for (int g = 0; g < Q; g++) {
                Floats score = sums[g][i] * m.scale;
                if (is_coded<C>) score *= read(scales + i * LANES);
                if (m.slopes) score -= m.slopes[h + g] * converted(int32_t(position) - other);
                score = hidden ? nothing : score;
                most[g] = most[g] < score ? score : most[g];
                std::memcpy(weights + g * stride + page + i * LANES, &score, sizeof score);
            }
        }
    }
    for (int g = 0; g < Q; g++) {
        float highest = -INFINITY, lanes[16];
        for (int i = 0; i < LANES; i++) highest = std::max(highest, most[g][i]);
        Floats total[16 / LANES];
        for (int i = 0; i < 16 / LANES; i++) total[i] = Floats{};
        for (int64_t i = g * stride + first; i < g * stride + end; i += 16)
            for (int j = 0; j < 16 / LANES; j++) {
                const Floats score = read(weights + i + j * LANES);
                const Floats weight = score == nothing ? Floats{} : exponential(score - highest);
                std::memcpy(weights + i + j * LANES, &weight, sizeof weight);
                total[j] += weight;
            }
        std::memcpy(lanes, total, sizeof lanes);
        totals[g] = lanes_sum(lanes);
        for (int64_t page = first; is_coded<C> && page < end; page += PAGE)
            for (int64_t i = 0; i < PAGE; i++)
                weights[g * stride + page + i] *= s.scales[pages.scales_at(page, kv_head) + PAGE + i];
    }
    int64_t e = 0;
    for (; e + 4 * LANES <= E; e += 4 * LANES)
        mix<C, Q, 4>(s, pages, kv_head, begin, position + 1, e, weights, stride, totals, y);
    for (; e + LANES <= E; e += LANES) mix<C, Q, 1>(s, pages, kv_head, begin, position + 1, e, weights, stride, totals, y);
    for (; e < E; e++)
        for (int g = 0; g < Q; g++) {
            float sum = 0;
            for (int64_t other = begin; other <= position; other++)
                sum += weights[g * stride + other] *
                       load((const C *)s.values + pages.at(other, kv_head) + other % PAGE * E + e);
            y[g * E + e] = sum / totals[g];
        }
}

template <class C>
INLINE void attend_by(const Model &m, const Layer &l, const Step &s, const Pages &p, int64_t token, int64_t kv_head,
                      const float *q, float *y, float *room, int64_t stride) {
    const int64_t group = m.heads / m.kv_heads, end = (kv_head + 1) * group;
    int64_t h = kv_head * group;
    for (; h + QUERIES <= end; h += QUERIES) attend_heads<C, QUERIES>(m, l, s, p, token, h, q, y, room, stride);
    if (QUERIES > 2)
        for (; h + 2 <= end; h += 2) attend_heads<C, 2>(m, l, s, p, token, h, q, y, room, stride);
    if (h < end) attend_heads<C, 1>(m, l, s, p, token, h, q, y, room, stride);
}

// What the query heads of one key head find for a token.
void attend(const Model &m, const Layer &l, const Step &s, const Pages &p, int64_t token, int64_t kv_head,
            const float *q, float *y, float *room, int64_t stride) {
    switch (m.cache_format) {
        case IN_FLOAT32: return attend_by<float>(m, l, s, p, token, kv_head, q, y, room, stride);
        case IN_BFLOAT16: return attend_by<Bfloat16>(m, l, s, p, token, kv_head, q, y, room, stride);
        default: return attend_by<int8_t>(m, l, s, p, token, kv_head, q, y, room, stride);
    }
}
