// Operators that work on one row, or one number, at a time: RMS norm, layer norm, activation functions. float32.
#include "parallel.h"
#include "simd.h"

namespace pellucid {
namespace {

// Calls body(offset, count) for each 16 numbers of a row; the last count may be smaller.
template <class Body>
PELLUCID_INLINE void for_each_vector(int64_t size, const Body& body) {
    for (int64_t i = 0; i < size; i += 16) body(i, static_cast<int>(std::min<int64_t>(16, size - i)));
}

template <class Body>
void for_each_row(int64_t rows, int64_t size, int threads, const Body& body) {
    threads = useful_threads(threads, rows * size);
    const EvenParts parts(rows, std::max<int64_t>(1, (rows + 4 * threads - 1) / (4 * threads)));
    for_each_unit(threads, parts.count, [&](int64_t part, int) {
        for (int64_t row = parts.begin(part); row < parts.begin(part) + parts.size(part); ++row) body(row);
    });
}

float inverse_root(float x) { return 1.0f / std::sqrt(x); }

// x sigmoid(y), exact for large |y| of either sign: one exponential that never overflows.
PELLUCID_INLINE F16 times_sigmoid(F16 x, F16 y) {
    const F16 one = broadcast(1.0f), zero = broadcast(0.0f);
    const F16 e = exp(zero - absolute(y));
    return x * select_less(y, zero, e, one) / (one + e);
}

struct Relu {
    PELLUCID_INLINE F16 operator()(F16 x) const { return max(broadcast(0.0f), x); }  // NaN stays NaN
};

struct Silu {
    PELLUCID_INLINE F16 operator()(F16 x) const { return times_sigmoid(x, x); }
};

// x/2 (1 + tanh u) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)   (Hendrycks & Gimpel 2016, arXiv:1606.08415)
struct GeluTanh {
    PELLUCID_INLINE F16 operator()(F16 x) const {
        const F16 inner = fma(x * x, broadcast(0.0713548163f), broadcast(1.59576912f));
        return times_sigmoid(x, x * inner);
    }
};

// x Phi(x), Phi the normal distribution function. With a = |x| and t = 4 / (4 + a):
// Phi(-a) = exp(-a^2 / 2) t p(t), p a minimax polynomial fitted for this file; so the tail keeps its relative accuracy.
struct Gelu {
    PELLUCID_INLINE F16 operator()(F16 x) const {
        static constexpr float coefficients[10] = {0.0171772707f, -0.066119656f, 0.0596941188f, 0.0173834749f,
                                                   0.0222140625f, 0.081366986f,  0.0739028379f, 0.0950895697f,
                                                   0.0995463505f, 0.0997449905f};
        const F16 size = min(broadcast(15.0f), absolute(x));
        const F16 t = broadcast(4.0f) / (broadcast(4.0f) + size);
        F16 p = broadcast(coefficients[0]);
#pragma GCC unroll 9
        for (int i = 1; i < 10; ++i) p = fma(p, t, broadcast(coefficients[i]));
        const F16 tail = exp(broadcast(-0.5f) * size * size) * (p * t);
        return x * select_less(x, broadcast(0.0f), tail, broadcast(1.0f) - tail);
    }
};

template <class Function>
void map(const float* x, float* out, int64_t size, int threads) {
    constexpr int64_t kChunk = 4096;
    for_each_row((size + kChunk - 1) / kChunk, 8 * kChunk, threads, [=](int64_t chunk) {
        const int64_t offset = chunk * kChunk;
        for_each_vector(std::min(kChunk, size - offset), [=](int64_t i, int count) {
            store(out + offset + i, Function()(load(x + offset + i, count)), count);
        });
    });
}

}  // namespace
}  // namespace pellucid

using namespace pellucid;

// out = x / sqrt(mean(x^2) + eps) * weight, over each row of x [rows, size]; weight [size] or null.
extern "C" void pellucid_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t size,
                                  float eps, int threads) {
    for_each_row(rows, size, threads, [=](int64_t row) {
        const float* from = x + row * size;
        F16 squares = broadcast(0.0f);
        for_each_vector(size, [&](int64_t i, int count) {
            const F16 value = load(from + i, count);
            squares = fma(value, value, squares);
        });
        const F16 factor = broadcast(inverse_root(horizontal_sum(squares) / static_cast<float>(size) + eps));
        for_each_vector(size, [&](int64_t i, int count) {
            F16 value = load(from + i, count) * factor;
            if (weight) value = value * load(weight + i, count);
            store(out + row * size + i, value, count);
        });
    });
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias, over each row; weight, bias [size] or null.
extern "C" void pellucid_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                                    int64_t size, float eps, int threads) {
    for_each_row(rows, size, threads, [=](int64_t row) {
        const float* from = x + row * size;
        F16 sum = broadcast(0.0f), squares = broadcast(0.0f);
        for_each_vector(size, [&](int64_t i, int count) { sum = sum + load(from + i, count); });
        const F16 mean = broadcast(horizontal_sum(sum) / static_cast<float>(size));
        for_each_vector(size, [&](int64_t i, int count) {
            const F16 distance = keep_lanes(load(from + i, count) - mean, 0, count, broadcast(0.0f));
            squares = fma(distance, distance, squares);
        });
        const F16 factor = broadcast(inverse_root(horizontal_sum(squares) / static_cast<float>(size) + eps));
        for_each_vector(size, [&](int64_t i, int count) {
            F16 value = (load(from + i, count) - mean) * factor;
            if (weight) value = value * load(weight + i, count);
            if (bias) value = value + load(bias + i, count);
            store(out + row * size + i, value, count);
        });
    });
}

extern "C" void pellucid_relu(const float* x, float* out, int64_t size, int threads) {
    map<Relu>(x, out, size, threads);
}

extern "C" void pellucid_silu(const float* x, float* out, int64_t size, int threads) {
    map<Silu>(x, out, size, threads);
}

extern "C" void pellucid_gelu(const float* x, float* out, int64_t size, int threads) {
    map<Gelu>(x, out, size, threads);
}

extern "C" void pellucid_gelu_tanh(const float* x, float* out, int64_t size, int threads) {
    map<GeluTanh>(x, out, size, threads);
}
