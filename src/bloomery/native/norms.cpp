// RMSNorm and LayerNorm with their gradients (model/norms.py). x is float32, y of a kind; what is learned is float32.
//
// Means are divided, and not multiplied by 1 / width, whose rounding all rows would share. The gradients of what is learned
// are summed up by thread, so that their last bits depend on the number of threads.

#include "numbers.hpp"

namespace {

struct Norm {
    const float *x, *weight, *bias;  // weight and bias may be null
    float *means, *inverses;         // of each row: its mean, if it is taken away, else null; 1 / deviation
    int64_t width;
};

template <class T> INLINE void norm(const Norm &n, void *y, float epsilon, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *const x = n.x + row * n.width, *const weight = n.weight, *const bias = n.bias;
        float mean = 0, sum = 0;
        if (n.means) {
#pragma omp simd reduction(+ : mean)
            for (int64_t i = 0; i < n.width; i++) mean += x[i];
            mean = n.means[row] = mean / float(n.width);
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n.width; i++) sum += (x[i] - mean) * (x[i] - mean);
        const float inverse = n.inverses[row] = 1.0f / std::sqrt(sum / float(n.width) + epsilon);
        T *const into = (T *)y + row * n.width;
#pragma omp simd
        for (int64_t i = 0; i < n.width; i++)
            store(into + i, (x[i] - mean) * inverse * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f));
    }
}

template <class T>
INLINE void norm_grads(const Norm &n, const void *dy, float *dx, float *dweight, float *dbias, int64_t begin,
                        int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *const x = n.x + row * n.width, *const weight = n.weight;
        const T *const grad = (const T *)dy + row * n.width;
        const float inverse = n.inverses[row], mean = n.means ? n.means[row] : 0.0f;
        float along = 0, level = 0;
#pragma omp simd reduction(+ : along, level)
        for (int64_t i = 0; i < n.width; i++) {
            const float one = load(grad + i) * (weight ? weight[i] : 1.0f);
            along += one * (x[i] - mean);
            level += one;
        }
        along *= inverse * inverse / float(n.width);
        level = n.means ? level / float(n.width) : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n.width; i++) {
            const float one = load(grad + i), rest = x[i] - mean;
            dx[row * n.width + i] = inverse * (one * (weight ? weight[i] : 1.0f) - level - rest * along);
            dweight[i] += one * rest * inverse;
            dbias[i] += one;
        }
    }
}

BOTH(norm, (const Norm &n, void *y, float epsilon, int64_t begin, int64_t end), (n, y, epsilon, begin, end))
BOTH(norm_grads,
     (const Norm &n, const void *dy, float *dx, float *dweight, float *dbias, int64_t begin, int64_t end),
     (n, dy, dx, dweight, dbias, begin, end))

}  // namespace

extern "C" {

// y = (x − mean) / √(mean((x − mean)²) + ε) · weight + bias by row; without means, no mean is taken away.
void bloomery_norm(int64_t kind, const float *x, const float *weight, const float *bias, void *y, float *means,
                   float *inverses, int64_t rows, int64_t width, float epsilon, int64_t threads) {
    const Norm n{x, weight, bias, means, inverses, width};
    split(rows, threads, [&](int64_t begin, int64_t end, int64_t) { EITHER(kind, norm, n, y, epsilon, begin, end); });
}

// sums: [threads, 2, width] of zeros; their sum over threads is the gradient of weight and of bias.
void bloomery_norm_grads(int64_t kind, const float *x, const float *weight, float *means, float *inverses,
                          const void *dy, float *dx, float *sums, int64_t rows, int64_t width, int64_t threads) {
    const Norm n{x, weight, nullptr, means, inverses, width};
    split(rows, threads, [&](int64_t begin, int64_t end, int64_t part) {
        float *const own = sums + 2 * part * width;
        EITHER(kind, norm_grads, n, dy, dx, own, own + width, begin, end);
    });
}
}
