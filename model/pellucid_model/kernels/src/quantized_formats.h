// Integer formats of linear weights. See linear.cpp for what a format is.
//
// Activations become whole numbers a, -127 to 127, with one scale for every group of a row. Products within a group
// are summed exactly, so their order does not matter; groups are added up in float32 in ascending order. There is no
// fused multiply-add in it, and so every CPU gives the same bits; but with AMX, int8 is another (quantized_tiles.h).
//
//   int8  w = s (q - 128), q from 1 to 255, s for each output; groups of 64
//         panel: q [K / 4][32][4], then s float32 [32]
//   int4  w = s q + m, q from 0 to 15, s and m for each output and group; groups of 32
//         panel, for each group: s, m half [2][32], then q [4][32][4], a byte's low half for inputs 8 i to 8 i + 3 and
//         its high half for 8 i + 4 to 8 i + 7
//
// K is padded to whole groups, with activations of 0. So that weights can be unsigned, sums begin at -128 times the sum
// of a (int8), and m is multiplied by the sum of a (int4).
#pragma once

#include "integers.h"
#include "linear_formats.h"
#include "scale.h"

namespace pellucid {
namespace {

// A group of activations: value = scale a.
template <int Size, class Correction>
struct ActivationGroup {
    Activation values[Size];
    float scale;
    Correction correction;
};

// Quantizes count <= Size numbers, returns the sum of a.
template <int Size, class Correction>
PELLUCID_INLINE int32_t quantize_group(const float* x, int64_t count, ActivationGroup<Size, Correction>& group) {
    float padded[Size];
    if (count < Size) {
        std::fill(std::copy_n(x, count, padded), padded + Size, 0.0f);
        x = padded;
    }
    const Scale scale(x, Size, 127.0f);
    group.scale = scale.scale;
    int8_t rounded[Size];
    int32_t sum = 0;
    for (int i = 0; i < Size; ++i) {
        const int32_t whole = scale.round(x[i]);
        rounded[i] = static_cast<int8_t>(whole);
        sum += whole;
    }
    for (int i = 0; i < Size; i += 4) store_four(group.values + i, rounded + i);
    return sum;
}

// Row r of a group's sums starts at `value`.
template <int Rows, int Vectors>
PELLUCID_INLINE void begin(I16 (&c)[Rows][Vectors], int r, int32_t value) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) c[r][v] = broadcast_integer(value);
}

// c[r][v] += four weights of each column times activations k to k + 3 of row r's group.
template <int Rows, int Vectors, class Left>
PELLUCID_INLINE void add_products(const Left* x, int64_t x_stride, int k, const Bytes (&weights)[Vectors],
                                  I16 (&c)[Rows][Vectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const Four four = load_four(x[r * x_stride].values + k);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) c[r][v] = dot(weights[v], four, c[r][v]);
    }
}

struct Int8Format : InRegisters {
    static constexpr int kGroup = 64;
    static constexpr int kCachedShift = 3;
    using Left = ActivationGroup<kGroup, int32_t>;
    static constexpr int kRows = kIntegerTileRows, kWideRows = kWideIntegerTileRows, kOnceRows = kRows;
    static constexpr bool kTakesFloats = false;

    static int64_t left_per_row(int64_t inputs) { return divide_up(inputs, kGroup); }
    static int64_t panel_bytes(int64_t inputs) { return left_per_row(inputs) * kGroup * kPanel + kPanel * 4; }
    static void prepare(const float* x, int64_t inputs, Left* row) {
        for (int64_t k = 0; k < inputs; k += kGroup, ++row)
            row->correction = -128 * quantize_group(x + k, std::min<int64_t>(kGroup, inputs - k), *row);
    }

    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply(const Left* x, int64_t x_stride, const std::byte* panel, int64_t apart,
                                         int64_t inputs, const Ahead& ahead, F16 (&sums)[Rows][Vectors]) {
        const int64_t groups = left_per_row(inputs);
        for (int64_t g = 0; g < groups; ++g) {
            I16 c[Rows][Vectors];
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) begin(c, r, x[r * x_stride + g].correction);
#pragma GCC unroll 4
            for (int k = 0; k < kGroup / 4; ++k) {
                Bytes weights[Vectors];
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    const int64_t step = g * (kGroup / 4) + k;
                    const auto* four = vector_of<std::byte>(panel, apart, v, (step * kPanel + v % 2 * 16) * 4);
                    ahead.fetch<Vectors>(four - panel);
                    weights[v] = load_bytes(reinterpret_cast<const uint8_t*>(four));
                }
                add_products<Rows, Vectors>(x + g, x_stride, 4 * k, weights, c);
            }
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const F16 scale = broadcast(x[r * x_stride + g].scale);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) sums[r][v] = sums[r][v] + to_float(c[r][v]) * scale;
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            const int64_t scales = groups * kGroup * kPanel / 4;
            const F16 scale = load(vector_of<float>(panel, apart, v, scales + v % 2 * 16));
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) sums[r][v] = sums[r][v] * scale;
        }
    }
};

struct Int4Format : InRegisters {
    static constexpr int kGroup = 32;
    static constexpr int kCachedShift = 2;
    using Left = ActivationGroup<kGroup, float>;
    static constexpr int kRows = std::max(kIntegerTileRows - 1, 1), kWideRows = std::max(kWideIntegerTileRows - 1, 1);
    static constexpr int kOnceRows = kRows;
    static constexpr bool kTakesFloats = false;
    static constexpr int kAhead = 2048;  // bytes to prefetch, where few rows leave it to memory how long it takes
    static constexpr int64_t kScaleBytes = 2 * kPanel * 2, kGroupBytes = kScaleBytes + kGroup * kPanel / 2;

    static int64_t left_per_row(int64_t inputs) { return divide_up(inputs, kGroup); }
    static int64_t panel_bytes(int64_t inputs) { return left_per_row(inputs) * kGroupBytes; }
    static void prepare(const float* x, int64_t inputs, Left* row) {
        for (int64_t k = 0; k < inputs; k += kGroup, ++row) {
            const int32_t sum = quantize_group(x + k, std::min<int64_t>(kGroup, inputs - k), *row);
            row->correction = row->scale * static_cast<float>(sum);
        }
    }

    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply(const Left* x, int64_t x_stride, const std::byte* panel, int64_t apart,
                                         int64_t inputs, const Ahead& ahead, F16 (&sums)[Rows][Vectors]) {
        const int64_t groups = left_per_row(inputs);
        const std::byte* const first = panel;
        for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes) {
            I16 c[Rows][Vectors];
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) begin(c, r, 0);
#pragma GCC unroll 4
            for (int k = 0; k < kGroup / 8; ++k) {
                Bytes low[Vectors], high[Vectors];
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    const int64_t offset = kScaleBytes + (k * kPanel + v % 2 * 16) * 4;
                    const auto* weights = vector_of<std::byte>(panel, apart, v, offset);
                    ahead.fetch<Vectors>(weights - first);
                    if (Vectors > 2) prefetch(weights + kAhead);
                    load_nibbles(reinterpret_cast<const uint8_t*>(weights), low[v], high[v]);
                }
                add_products<Rows, Vectors>(x + g, x_stride, 8 * k, low, c);
                add_products<Rows, Vectors>(x + g, x_stride, 8 * k + 4, high, c);
            }
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) {
                const half* scales = vector_of<half>(panel, apart, v, v % 2 * 16);
                ahead.fetch<Vectors>(panel - first + 64 * v);
                const F16 scale = load(scales), minimum = load(scales + kPanel);
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) {
                    const Left& left = x[r * x_stride + g];
                    const F16 product = to_float(c[r][v]) * broadcast(left.scale) * scale;
                    sums[r][v] = sums[r][v] + (product + minimum * broadcast(left.correction));
                }
            }
        }
    }
};

}  // namespace
}  // namespace pellucid
