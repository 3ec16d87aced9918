// Words, shingles and minima of texts: what data/dedup/hashing.py and data/dedup/minhash.py compute with numpy, number for number.
// Their docstrings have the formulas. All arithmetic is modulo 2**64 or 2**32, on purpose.

#include "library.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr uint64_t RADIX = 0x9E3779B97F4A7C15ull;
constexpr uint64_t INVERSE = 0xF1DE83E19937733Dull;  // of RADIX
constexpr uint64_t STEP = 0xD1342543DE82EF95ull;
constexpr uint32_t SPACE = 1u << 24, WORD = 1u << 25, LOWERED = SPACE - 1;
constexpr uint64_t EIGHT_ONES = 0x0101010101010101ull, GATHER = 0x0102040810204080ull;  // the lowest bits of 8 bytes
constexpr int CHUNK = 1024;               // characters whose sums are in the first-level cache
constexpr int64_t AT_ONCE = 512;          // shingles whose sums are in the first-level cache
constexpr int64_t MINIMA_AT_ONCE = 4096;  // numbers that every permutation goes over while they are in that cache
constexpr int64_t LARGEST_BUCKET = 48;

INLINE uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

// The code point at `at`, of valid UTF-8 in which surrogates may stand; moves on behind it.
INLINE uint32_t next_point(const uint8_t *&at) {
    const uint32_t first = *at++;
    if (first < 0x80) return first;
    if (first < 0xE0) return (first & 0x1F) << 6 | (*at++ & 0x3F);
    if (first < 0xF0) {
        at += 2;
        return (first & 0x0F) << 12 | (at[-2] & 0x3Fu) << 6 | (at[-1] & 0x3Fu);
    }
    at += 3;
    return (first & 0x07) << 18 | (at[-3] & 0x3Fu) << 12 | (at[-2] & 0x3Fu) << 6 | (at[-1] & 0x3Fu);
}

// Powers of RADIX and of its inverse. A run that goes over the end of a chunk is moved to the next one.
struct Powers {
    uint64_t up[CHUNK + 1], down[CHUNK + 1];

    constexpr Powers() : up(), down() {
        up[0] = down[0] = 1;
        for (int i = 0; i < CHUNK; i++) up[i + 1] = up[i] * RADIX, down[i + 1] = down[i] * INVERSE;
    }
};
constexpr Powers POWERS;

// Runs of characters of one kind, as words are. What is between 64 characters is told by bits, and not by branches.
struct Runs {
    uint64_t *hashes;   // of run n: its prefix sum, then a difference of prefix sums …
    uint64_t *factors;  // … and what to multiply that with
    int64_t begun = 0, ended = 0;
    uint64_t inside = 0;

    // Bit i of `belongs`: whether character i does. prefix[i]: Σ v r**j of the characters before it; inverse[i]: r**−i
    INLINE_MEMBER void step(uint64_t belongs, const uint64_t *prefix, const uint64_t *inverse) {
        const uint64_t changes = belongs ^ (belongs << 1 | inside);
        inside = belongs >> 63;
        for (uint64_t starts = changes & belongs; starts; starts &= starts - 1, begun++) {
            const int place = __builtin_ctzll(starts);
            hashes[begun] = prefix[place];
            factors[begun] = inverse[place];
        }
        for (uint64_t ends = changes & ~belongs; ends; ends &= ends - 1, ended++)
            hashes[ended] = prefix[__builtin_ctzll(ends)] - hashes[ended];
    }
    // After a chunk whose characters sum up to `whole`: a run that has not ended counts from the next one on.
    INLINE_MEMBER void move_on(uint64_t whole) {
        if (begun == ended) return;
        hashes[ended] = (hashes[ended] - whole) * POWERS.down[CHUNK];
        factors[ended] *= POWERS.up[CHUNK];
    }
    INLINE_MEMBER void finish() {
        for (int64_t n = 0; n < ended; n++) hashes[n] = mix(hashes[n] * factors[n]);
    }
};

// Characters of texts, looked at a chunk at a time, and the words and tokens among them.
struct Scanner {
    Runs words, tokens;
    int filled = 0;
    uint32_t values[CHUNK + 8];

    // A character's value. Where a run is to end, SPACE.
    INLINE_MEMBER void add(uint32_t value) {
        values[filled] = value;
        if (++filled == CHUNK) flush();
    }
    INLINE_MEMBER void add_ascii(const uint8_t *eight, const uint32_t *table) {
        const int over = filled + 8 - CHUNK;
        for (int i = 0; i < 8; i++) values[filled + i] = table[eight[i]];
        filled += 8;
        if (over < 0) return;
        filled = CHUNK;
        uint32_t rest[8];
        for (int i = 0; i < over; i++) rest[i] = values[CHUNK + i];
        flush();
        for (int i = 0; i < over; i++) values[i] = rest[i];
        filled = over;
    }
    INLINE_MEMBER void flush() {
        const int used = (filled + 63) / 64 * 64;
        for (int i = filled; i < used; i++) values[i] = SPACE;
        uint64_t prefix[CHUNK + 1];
        uint8_t flags[CHUNK];
        prefix[0] = 0;
        for (int i = 0; i < used; i++) prefix[i + 1] = prefix[i] + values[i] * POWERS.up[i];
        for (int i = 0; i < used; i++) flags[i] = uint8_t(values[i] >> 24);
        for (int i = 0; i < used; i += 64) {
            uint64_t in_word = 0, in_space = 0;
            for (int j = 0; j < 64; j += 8) {
                uint64_t eight;
                std::memcpy(&eight, flags + i + j, 8);
                in_word |= ((eight >> 1 & EIGHT_ONES) * GATHER >> 56) << j;
                in_space |= ((eight & EIGHT_ONES) * GATHER >> 56) << j;
            }
            words.step(in_word, prefix + i, POWERS.down + i);
            tokens.step(~in_space, prefix + i, POWERS.down + i);
        }
        if (filled == CHUNK) words.move_on(prefix[CHUNK]), tokens.move_on(prefix[CHUNK]);
        filled = 0;
    }
};

}  // namespace

// Hashes of the words and of the white-space-separated tokens of texts, one text after the other.
// text d: utf8[offsets[d] … offsets[d + 1]]; values: of every code point (shingles.code_point_values)
// words, tokens: room for half as many as there are bytes, one more for each text, and one more
// word_bounds, token_bounds: [num_texts + 1]
// piece: a run without white space is cut where shingles.cuts cuts a text, if it is above 0
extern "C" FOR_EVERY_CPU void bloomery_scan(const uint8_t *utf8, const int64_t *offsets, int64_t num_texts,
                                            const uint32_t *values, int64_t piece, uint64_t *words,
                                            int64_t *word_bounds, uint64_t *tokens, int64_t *token_bounds) {
    static thread_local std::vector<uint64_t> word_factors, token_factors;
    const size_t room = (offsets[num_texts] - offsets[0]) / 2 + num_texts + 1;
    if (word_factors.size() < room) word_factors.resize(room), token_factors.resize(room);
    Scanner scanner{{words, word_factors.data()}, {tokens, token_factors.data()}};
    word_bounds[0] = token_bounds[0] = 0;
    for (int64_t d = 0; d < num_texts; d++) {
        const uint8_t *at = utf8 + offsets[d], *const end = utf8 + offsets[d + 1];
        int64_t until_cut = piece;  // characters
        while (at < end) {
            uint64_t eight;
            if (piece <= 0 && end - at >= 8 && (std::memcpy(&eight, at, 8), !(eight & EIGHT_ONES << 7))) {
                scanner.add_ascii(at, values);
                at += 8;
                continue;
            }
            const uint32_t value = values[next_point(at)];
            if (piece > 0 && until_cut-- <= 0 && ((value & SPACE) || until_cut < -piece)) {
                scanner.add(SPACE);
                until_cut = piece - 1;
            }
            scanner.add(value);
        }
        scanner.add(SPACE);
        scanner.flush();
        word_bounds[d + 1] = scanner.words.ended;
        token_bounds[d + 1] = scanner.tokens.ended;
    }
    scanner.words.finish();
    scanner.tokens.finish();
}

// Hashes of the characters of texts in lower case, with every run of white space as one space and none at the ends.
// characters: room for as many as there are bytes; bounds: [num_texts + 1]
extern "C" void bloomery_characters(const uint8_t *utf8, const int64_t *offsets, int64_t num_texts,
                                    const uint32_t *values, uint64_t *characters, int64_t *bounds) {
    int64_t count = 0;
    bounds[0] = 0;
    for (int64_t d = 0; d < num_texts; d++) {
        const uint8_t *at = utf8 + offsets[d], *const end = utf8 + offsets[d + 1];
        bool gap = false;
        while (at < end) {
            const uint32_t value = values[next_point(at)];
            if (value & SPACE) {
                gap = count > bounds[d];
                continue;
            }
            if (gap) characters[count++] = mix(uint64_t(' ') + 1);
            characters[count++] = mix(value & LOWERED);
            gap = false;
        }
        bounds[d + 1] = count;
    }
}

// Hashes of `size` neighbors each, none over the end of a text.
// found: room for as many as there are hashes; found_bounds: [num_texts + 1]
extern "C" FOR_EVERY_CPU void bloomery_shingles(const uint64_t *hashes, const int64_t *bounds, int64_t num_texts,
                                                int64_t size, uint64_t *found, int64_t *found_bounds) {
    int64_t count = 0;
    found_bounds[0] = 0;
    for (int64_t d = 0; d < num_texts; d++) {
        const int64_t end = bounds[d + 1] - size + 1;
        for (int64_t first = bounds[d]; first < end; first += AT_ONCE) {
            const int64_t here = std::min(AT_ONCE, end - first);
            const uint64_t *from = hashes + first;
            uint64_t sums[AT_ONCE];
            for (int64_t k = 0; k < here; k++) sums[k] = from[k];
            uint64_t power = STEP;
            for (int64_t j = 1; j < size; j++, power *= STEP)
                for (int64_t k = 0; k < here; k++) sums[k] += from[k + j] * power;
            for (int64_t k = 0; k < here; k++) found[count + k] = mix(sums[k]);
            count += here;
        }
        found_bounds[d + 1] = count;
    }
}

// The least of factor * (upper half of a hash) over the hashes of each text, for each factor.
// minima: [num_factors, num_texts]; the largest number where a text has none
extern "C" FOR_EVERY_CPU void bloomery_minima(const uint64_t *hashes, const int64_t *bounds, int64_t num_texts,
                                              const uint32_t *factors, int64_t num_factors, uint32_t *minima) {
    std::fill(minima, minima + num_factors * num_texts, UINT32_MAX);
    uint32_t numbers[MINIMA_AT_ONCE];
    for (int64_t d = 0; d < num_texts; d++) {
        for (int64_t first = bounds[d]; first < bounds[d + 1]; first += MINIMA_AT_ONCE) {
            const int64_t here = std::min(MINIMA_AT_ONCE, bounds[d + 1] - first);
            for (int64_t k = 0; k < here; k++) numbers[k] = uint32_t(hashes[first + k] >> 32);
            for (int64_t p = 0; p < num_factors; p += 4) {  // a permutation too many is computed, and not written
                uint32_t factor[4], least[4];
                for (int64_t i = 0; i < 4; i++) {
                    factor[i] = p + i < num_factors ? factors[p + i] : 1;
                    least[i] = UINT32_MAX;
                }
                uint32_t a = UINT32_MAX, b = UINT32_MAX, c = UINT32_MAX, e = UINT32_MAX;
                for (int64_t k = 0; k < here; k++) {
                    a = std::min(a, numbers[k] * factor[0]);
                    b = std::min(b, numbers[k] * factor[1]);
                    c = std::min(c, numbers[k] * factor[2]);
                    e = std::min(e, numbers[k] * factor[3]);
                }
                least[0] = a, least[1] = b, least[2] = c, least[3] = e;
                for (int64_t i = 0; i < 4 && p + i < num_factors; i++) {
                    uint32_t &known = minima[(p + i) * num_texts + d];
                    known = std::min(known, least[i]);
                }
            }
        }
    }
}

// The hashes of each text in order and without repeats, one text after the other.
// sets: room for as many as there are hashes; sizes: [num_texts]
extern "C" void bloomery_sets(const uint64_t *hashes, const int64_t *bounds, int64_t num_texts, uint64_t *sets,
                              int64_t *sizes) {
    std::vector<uint32_t> ends;
    uint64_t *out = sets;
    for (int64_t d = 0; d < num_texts; d++) {
        const uint64_t *from = hashes + bounds[d];
        const int64_t count = bounds[d + 1] - bounds[d];
        int bits = 1;
        while ((int64_t(4) << bits) < count && bits < 20) bits++;
        // hashes are evenly spread, so their first bits put them nearly in order
        ends.assign(size_t(1) << bits, 0);
        for (int64_t k = 0; k < count; k++) ends[from[k] >> (64 - bits)]++;
        uint32_t sum = 0;
        for (uint32_t &end : ends) sum += end, end = sum;
        for (int64_t k = 0; k < count; k++) out[--ends[from[k] >> (64 - bits)]] = from[k];
        for (size_t bucket = 0; bucket < ends.size(); bucket++) {
            uint64_t *const first = out + ends[bucket];
            uint64_t *const last = out + (bucket + 1 < ends.size() ? ends[bucket + 1] : count);
            if (last - first > LARGEST_BUCKET) {
                std::sort(first, last);
                continue;
            }
            for (uint64_t *next = first + 1; next < last; next++) {
                const uint64_t value = *next;
                uint64_t *place = next;
                for (; place > first && place[-1] > value; place--) *place = place[-1];
                *place = value;
            }
        }
        uint64_t *const end = std::unique(out, out + count);
        sizes[d] = end - out;
        out = end;
    }
}

// How many numbers two ascending sets without repeats share.
extern "C" int64_t bloomery_shared(const uint64_t *a, int64_t num_a, const uint64_t *b, int64_t num_b) {
    const uint64_t *const end_a = a + num_a, *const end_b = b + num_b;
    int64_t shared = 0;
    while (a < end_a && b < end_b) {
        const uint64_t one = *a, two = *b;
        shared += one == two;
        a += one <= two;
        b += two <= one;
    }
    return shared;
}
