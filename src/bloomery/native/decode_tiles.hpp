// Included once for each width of vectors, in a namespace of its own: LANES numbers are computed together. A panel of 16
// rows takes 16 / LANES vectors.

constexpr int64_t SPLIT = PANEL / LANES;          // vectors of a panel
constexpr int64_t TOKENS = LANES == 16 ? 8 : 4;   // that are multiplied at once
constexpr int64_t PANELS = 4;                     // of which are computed together where there is one token

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

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
typedef __m128i Bytes;
INLINE Bytes bytes(const uint8_t *at) { return _mm_loadu_si128((const __m128i *)at); }
INLINE Words words(Bytes some) { return (Words)_mm512_cvtepu8_epi32(some); }
INLINE Floats converted(Words numbers) { return (Floats)_mm512_cvtepi32_ps((__m512i)numbers); }
#elif LANES == 8
INLINE Floats read(const Bfloat16 *at) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
}
INLINE Floats read(const Float16 *at) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE Floats read(const int8_t *at) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}
typedef __m128i Bytes;
INLINE Bytes bytes(const uint8_t *at) { return _mm_loadl_epi64((const __m128i *)at); }
INLINE Words words(Bytes some) { return (Words)_mm256_cvtepu8_epi32(some); }
INLINE Floats converted(Words numbers) { return (Floats)_mm256_cvtepi32_ps((__m256i)numbers); }
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
struct Bytes {
    uint8_t code[LANES];
};
INLINE Bytes bytes(const uint8_t *at) {
    Bytes some;
    std::memcpy(&some, at, sizeof some);
    return some;
}
INLINE Words words(Bytes some) {
    Words value;
    for (int i = 0; i < LANES; i++) value[i] = some.code[i];
    return value;
}
INLINE Floats converted(Words numbers) { return __builtin_convertvector(numbers, Floats); }
#endif

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

// Weights that are numbers by themselves, or codes with a scale a row.
template <class W, int P, int T>
INLINE void plain_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y) {
    Sums<P, T> sums;
    const W *const panel = (const W *)m.codes + first * PANEL * m.width;
    for (int64_t k = 0; k < m.width; k++)
        for (int p = 0; p < P; p++)
            for (int s = 0; s < SPLIT; s++) {
                const Floats w = read(panel + (p * m.width + k) * PANEL + s * LANES);
                for (int t = 0; t < T; t++) sums.at[p][s][t] += w * x[t][k];
            }
    sums.write(m, first, y);
}

// int4: two codes a byte, k and k + 16 of a group. w = factor · code + added. Behind x are the sums of its groups.
template <int P, int T>
INLINE void int4_tile(const Matrix &m, int64_t first, const float *const *x, float *const *y) {
    const int64_t groups = m.width / GROUP;
    Sums<P, T> sums;
    const uint8_t *codes = (const uint8_t *)m.codes + first * groups * PANEL * GROUP / 2;
    const Float16 *scales = (const Float16 *)m.scales + first * groups * 2 * PANEL;
    for (int64_t group = 0; group < groups; group++, codes += PANEL * GROUP / 2, scales += 2 * PANEL)
        for (int s = 0; s < SPLIT; s++) {
            Floats part[P][T] = {}, late[P][T] = {};  // of two sums, neither waits for the other
            for (int64_t k = 0; k < GROUP / 2; k++)
                for (int p = 0; p < P; p++) {
                    const Words pair = words(bytes(codes + p * groups * PANEL * GROUP / 2 + k * PANEL + s * LANES));
                    const Floats low = converted(pair & 15), high = converted(pair >> 4);
                    for (int t = 0; t < T; t++) {
                        part[p][t] += low * x[t][group * GROUP + k];
                        late[p][t] += high * x[t][group * GROUP + k + GROUP / 2];
                    }
                }
            for (int p = 0; p < P; p++) {
                const Float16 *const at = scales + p * groups * 2 * PANEL + s * LANES;
                for (int t = 0; t < T; t++)
                    sums.at[p][s][t] += (part[p][t] + late[p][t]) * read(at) + x[t][m.width + group] * read(at + PANEL);
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
                    const Words pair = words(bytes(codes + p * blocks * PANEL * BLOCK / 2 + k * PANEL + s * LANES));
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

template <int P, int T> INLINE void tile(const Matrix &m, int64_t first, const float *const *x, float *const *y) {
    switch (m.format) {
        case IN_FLOAT32: return plain_tile<float, P, T>(m, first, x, y);
        case IN_BFLOAT16: return plain_tile<Bfloat16, P, T>(m, first, x, y);
        case IN_INT8: return plain_tile<int8_t, P, T>(m, first, x, y);
        case IN_INT4: return int4_tile<P, T>(m, first, x, y);
        default: return nf4_tile<P, T>(m, first, x, y);
    }
}

// Panels begin … end of y for all tokens. Rows of x are x_stride numbers apart, and rows of y y_stride.
void panels(const Matrix &m, int64_t begin, int64_t end, int64_t tokens, const float *x, int64_t x_stride, float *y,
            int64_t y_stride) {
    const float *from[TOKENS];
    float *to[TOKENS];
    for (int64_t panel = begin; panel < end;) {
        const bool several = tokens == 1 && panel + PANELS <= end;
        for (int64_t token = 0; token < tokens;) {
            const int64_t count = token + TOKENS <= tokens ? TOKENS : token + 2 <= tokens ? 2 : 1;
            for (int64_t t = 0; t < count; t++) from[t] = x + (token + t) * x_stride, to[t] = y + (token + t) * y_stride;
            if (count == TOKENS) tile<1, TOKENS>(m, panel, from, to);
            else if (count == 2) tile<1, 2>(m, panel, from, to);
            else if (several) tile<PANELS, 1>(m, panel, from, to);
            else tile<1, 1>(m, panel, from, to);
            token += count;
        }
        const int64_t next = panel + (several ? PANELS : 1);
        if (m.bias)
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t r = panel * PANEL; r < std::min(next * PANEL, m.rows); r++) y[t * y_stride + r] += m.bias[r];
        panel = next;
    }
}
