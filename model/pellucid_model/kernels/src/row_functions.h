// What happens to one row, or one vector of it: norms and activation functions. float32.
#pragma once

#include <algorithm>

#include "simd.h"

namespace pellucid {
namespace {

// Calls body(offset, count) for each 16 numbers of a row; the last count may be smaller.
template <class Body>
PELLUCID_INLINE void for_each_vector(int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) body(i, Whole());
    if (i < size) body(i, static_cast<int>(size - i));
}

PELLUCID_INLINE float inverse_root(float x) { return 1.0f / std::sqrt(x); }

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

struct Tanh {
    PELLUCID_INLINE F16 operator()(F16 x) const { return tanh(x); }
};

struct Sigmoid {
    PELLUCID_INLINE F16 operator()(F16 x) const { return times_sigmoid(broadcast(1.0f), x); }
};

struct Exp {
    PELLUCID_INLINE F16 operator()(F16 x) const { return exp(x); }
};

struct SquareRoot {
    PELLUCID_INLINE F16 operator()(F16 x) const {
        float lanes[16];
        store(lanes, x);
        for (float& lane : lanes) lane = std::sqrt(lane);  // rounded correctly on every CPU
        return load(lanes);
    }
};

struct Absolute {
    PELLUCID_INLINE F16 operator()(F16 x) const { return absolute(x); }
};

struct Reciprocal {
    PELLUCID_INLINE F16 operator()(F16 x) const { return broadcast(1.0f) / x; }
};

// The sum, or the largest, of a row. NaN where one of them is.
PELLUCID_INLINE float row_sum(const float* x, int64_t size) {
    F16 sum = broadcast(0.0f);
    for_each_vector(size, [&](int64_t i, auto count) { sum = sum + load(x + i, count); });
    return horizontal_sum(sum);
}

inline float row_max(const float* x, int64_t size) {
    float largest = x[0];
    for (int64_t i = 1; i < size; ++i) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
    return largest;
}

// out = x / sqrt(mean(x^2) + eps) * weight; weight [size] or null.
PELLUCID_INLINE void rms_norm_row(const float* x, const float* weight, float* out, int64_t size, float eps) {
    F16 squares = broadcast(0.0f);
    for_each_vector(size, [&](int64_t i, auto count) {
        const F16 value = load(x + i, count);
        squares = fma(value, value, squares);
    });
    const F16 factor = broadcast(inverse_root(horizontal_sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, auto count) {
        F16 value = load(x + i, count) * factor;
        if (weight) value = value * load(weight + i, count);
        store(out + i, value, count);
    });
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias; weight, bias [size] or null.
PELLUCID_INLINE void layer_norm_row(const float* x, const float* weight, const float* bias, float* out, int64_t size,
                                    float eps) {
    F16 sum = broadcast(0.0f), squares = broadcast(0.0f);
    for_each_vector(size, [&](int64_t i, auto count) { sum = sum + load(x + i, count); });
    const F16 mean = broadcast(horizontal_sum(sum) / static_cast<float>(size));
    for_each_vector(size, [&](int64_t i, auto count) {
        const F16 distance = keep_first(load(x + i, count) - mean, count);
        squares = fma(distance, distance, squares);
    });
    const F16 factor = broadcast(inverse_root(horizontal_sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, auto count) {
        F16 value = (load(x + i, count) - mean) * factor;
        if (weight) value = value * load(weight + i, count);
        if (bias) value = value + load(bias + i, count);
        store(out + i, value, count);
    });
}

}  // namespace
}  // namespace pellucid
