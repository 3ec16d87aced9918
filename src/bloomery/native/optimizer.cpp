// The update of AdamW and the norms of gradients, each in one pass over memory. All is float32.

#include "numbers.hpp"

namespace {

constexpr int64_t CHUNK = 1 << 14;  // numbers: the order of sums depends on it, and not on threads
constexpr int64_t STREAMS = 4;      // places that are read at once: one alone waits for memory
constexpr int64_t AT_ONCE = 16;

struct Rule {
    float shrink, beta1, beta2, rate, correction, epsilon, factor;
};

FOR_EVERY_CPU void adamw(float *p, const float *g, float *m, float *v, const Rule &rule, int64_t begin, int64_t end) {
    const Rule r = rule;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float grad = g[i] * r.factor;
        const float mean = m[i] + (1.0f - r.beta1) * (grad - m[i]);
        const float square = r.beta2 * v[i] + (1.0f - r.beta2) * grad * grad;
        m[i] = mean;
        v[i] = square;
        p[i] = p[i] * r.shrink - r.rate * mean / (std::sqrt(square) * r.correction + r.epsilon);
    }
}

FOR_EVERY_CPU void squares(const float *x, int64_t count, double *sums, int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const float *const from = x + chunk * CHUNK;
        const int64_t numbers = std::min(CHUNK, count - chunk * CHUNK);
        const int64_t each = numbers / STREAMS / AT_ONCE * AT_ONCE;
        float lanes[STREAMS][AT_ONCE] = {};
        for (int64_t i = 0; i < each; i += AT_ONCE)
            for (int64_t stream = 0; stream < STREAMS; stream++)
#pragma omp simd
                for (int64_t lane = 0; lane < AT_ONCE; lane++) {
                    const float one = from[stream * each + i + lane];
                    lanes[stream][lane] += one * one;
                }
        double sum = 0;
        for (int64_t stream = 0; stream < STREAMS; stream++)
            for (int64_t lane = 0; lane < AT_ONCE; lane++) sum += lanes[stream][lane];
        for (int64_t i = each * STREAMS; i < numbers; i++) sum += double(from[i]) * from[i];
        sums[chunk] = sum;
    }
}

}  // namespace

extern "C" {

// p ← p · shrink − rate · m / (√v · correction + ε), with m and v the means of gradients times `factor` and of their squares.
void bloomery_adamw(float *p, const float *g, float *m, float *v, int64_t count, float shrink, float beta1, float beta2,
                    float rate, float correction, float epsilon, float factor, int64_t threads) {
    const Rule rule{shrink, beta1, beta2, rate, correction, epsilon, factor};
    const int64_t lines = (count + AT_ONCE - 1) / AT_ONCE;
    split(lines, count < CHUNK ? 1 : threads, [&](int64_t begin, int64_t end, int64_t) {
        adamw(p, g, m, v, rule, begin * AT_ONCE, std::min(end * AT_ONCE, count));
    });
}

// sums[i]: the sum of squares of the i-th chunk.
void bloomery_squares(const float *x, int64_t count, double *sums, int64_t threads) {
    split((count + CHUNK - 1) / CHUNK, threads,
          [&](int64_t begin, int64_t end, int64_t) { squares(x, count, sums, begin, end); });
}
}
