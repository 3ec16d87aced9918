// Products by tiles (AMX): a block of the right side that fits the second cache at a time.
#pragma once

#include "products.hpp"

#ifdef UNITS

namespace {

constexpr int64_t TILES_INNER = 1536, TILES_BLOCK = 320 * 1024;  // k's summed up without a stop; numbers of a block

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A panel by a panel: 32 x 32 sums.
INLINE void multiply_tiles(const uint16_t *left, const uint16_t *right, int64_t steps, int64_t count, const Into &into) {
    alignas(64) float sums[PANEL * PANEL];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, left += PAIR, right += PAIR) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
    for (int64_t i = 0; i < count; i++) write(into, i, _mm512_load_ps(sums + 32 * i), _mm512_load_ps(sums + 32 * i + 16));
}

void part_by_tiles(const Product &p, int64_t top, int64_t bottom, int64_t begin, int64_t end) {
    const Config config;
    _tile_loadconfig(&config);
    const int64_t pieces = (p.inner + TILES_INNER - 1) / TILES_INNER;
    const int64_t piece = (p.inner + pieces * STEP - 1) / (pieces * STEP) * STEP, whole = piece / STEP * PAIR;
    const int64_t fits = std::max<int64_t>(1, TILES_BLOCK / (piece * PANEL)), panels = (end - begin + PANEL - 1) / PANEL;
    const int64_t blocks = (panels + fits - 1) / fits, wide = (panels + blocks - 1) / blocks * PANEL;
    const int64_t heights = (bottom - top + PANEL - 1) / PANEL, width = (panels + 1) * PANEL;
    uint16_t *const right = room<0>(wide / PANEL * whole), *const left = room<1>(blocks > 1 ? heights * whole : whole);
    const bool aside = pieces > 1 && p.output == Output::rounded;
    float *const partial = aside ? (float *)room<2>(2 * heights * PANEL * width) : nullptr;
    for (int64_t k = 0; k < p.inner; k += piece) {
        const int64_t until = std::min(k + piece, p.inner), steps = (until - k + STEP - 1) / STEP;
        if (blocks > 1) pack(left, p.left, true, top, bottom, bottom, k, until);
        for (int64_t first = begin; first < end; first += wide) {
            const int64_t stop = std::min(first + wide, end);
            pack(right, p.right, false, first, stop, end, k, until);
            for (int64_t row = top; row < bottom; row += PANEL) {
                const uint16_t *const panel = blocks > 1 ? left + (row - top) / PANEL * steps * PAIR : left;
                if (blocks == 1) pack(left, p.left, true, row, row + PANEL, bottom, k, until);
                for (int64_t column = first; column < stop; column += PANEL) {
                    const uint16_t *const beside = right + (column - first) / PANEL * steps * PAIR;
                    float *const so_far = partial ? partial + (row - top) * width + column - begin : nullptr;
                    const Into into(p, row, column, end, so_far, width, k == 0, until == p.inner);
                    multiply_tiles(panel, beside, steps, std::min(PANEL, bottom - row), into);
                }
            }
        }
    }
    _tile_release();
    _mm_sfence();
}

#pragma GCC pop_options

}  // namespace

#endif
