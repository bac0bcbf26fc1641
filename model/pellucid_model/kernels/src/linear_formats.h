// Float formats of linear weights. See linear.cpp for what a format is.
//
//   float32   panel [K][32]
//   bfloat16  panel [K / 2][32][2], K padded with a zero to whole pairs; activations are rounded to bfloat16 once
//
// Sums are float32, each one chain in ascending k.
#pragma once

#include <algorithm>

#include "tile.h"

namespace pellucid {
namespace {

constexpr int kPanel = 32;

PELLUCID_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where vector v of a tile reads its weights: a panel has two vectors of columns, and the second one begins `apart` bytes
// behind the first.
template <class Weight>
PELLUCID_INLINE const Weight* vector_of(const std::byte* panel, int64_t apart, int v, int64_t offset) {
    return reinterpret_cast<const Weight*>(panel + (v / 2) * apart) + offset;
}

// What a tile fetches while it is multiplied, so that memory works at the same time: weights into the nearest cache, and
// keys and values into the next one; of each as many bytes as the tile's own weights shifted right. Tiles two panels wide
// fetch nothing: they read as fast as memory gives.
struct Ahead {
    static constexpr int kNothing = 63;  // as shift: the same line over and over, which is there

    const std::byte* weights;
    int shift;
    const std::byte* cached;
    int cached_shift;

    // To be called for each vector of weights that is read, with its distance from the tile's first one, in bytes.
    template <int Vectors>
    PELLUCID_INLINE void fetch(int64_t distance) const {
        if (Vectors > 2) return;
        prefetch(weights + (distance >> shift));
        prefetch_to_l2(cached + (distance >> cached_shift));
    }

    // The same for all lines of `bytes` at a distance, into the next cache.
    template <int Vectors>
    PELLUCID_INLINE void fetch(int64_t distance, int64_t bytes) const {
        if (Vectors > 2) return;
        const int64_t end = distance + bytes;
        for (int64_t at = distance; at < end; at += step_of(shift)) prefetch_to_l2(weights + (at >> shift));
        for (int64_t at = distance; at < end; at += step_of(cached_shift)) prefetch_to_l2(cached + (at >> cached_shift));
    }

    // How many bytes of a tile's own weights go with a line of what it fetches.
    static int64_t step_of(int shift) { return int64_t{64} << std::min(shift, 16); }
};

// Of a row that layers take as it is; see rounded_stride.
template <class Count>
PELLUCID_INLINE void store_for_layers([[maybe_unused]] bf16* to, [[maybe_unused]] F16 x, [[maybe_unused]] Count count) {
#if defined(__AVX512BF16__)
    store(to, x, count);
#else
    __builtin_unreachable();
#endif
}

// Any number of rows in a tile, which multiplies about as fast as the next cache gives weights.
struct InRegisters {
    static constexpr int kStep = 1, kWideStep = 1;  // of a tile's height, one panel wide and two
    static constexpr int64_t kRowsApart = 16, kHeldRowBytes = 256 << 10, kFinishedRows = kTileRows;
    static PELLUCID_INLINE void between_products() {}
};

struct Float32Format : InRegisters {
    using Left = float;
    using Number = float;
    static constexpr int kPack = 1;  // numbers that one step of a chain takes
    static constexpr int kCachedShift = 3;
    static constexpr int kRows = kTileRows, kWideRows = kWideTileRows, kOnceRows = std::min(kRows, 8);
    static constexpr bool kTakesFloats = true;  // no need to prepare rows

    static PELLUCID_INLINE F16 left_pack(const Left* x) { return broadcast(*x); }
    static PELLUCID_INLINE F16 right_packs(const Number* y) { return load(y); }
    static PELLUCID_INLINE F16 right_packs(const Number* y, int count) { return load(y, count); }
    static PELLUCID_INLINE F16 multiply_add(F16 a, F16 b, F16 sum) { return fma(a, b, sum); }

    static int64_t left_per_row(int64_t inputs) { return inputs; }
    static int64_t panel_bytes(int64_t inputs) { return inputs * kPanel * 4; }
    static void prepare(const float* x, int64_t inputs, Left* row) { std::memcpy(row, x, inputs * sizeof *x); }

    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply(const Left* x, int64_t x_stride, const std::byte* panel, int64_t apart,
                                         int64_t inputs, const Ahead& ahead, F16 (&sums)[Rows][Vectors]) {
        accumulate(Product<Vectors>{x, x_stride, panel, apart, ahead}, 0, inputs, sums);
    }

    template <int Vectors>
    struct Product {
        const Left* x;
        int64_t x_stride;
        const std::byte* panel;
        int64_t apart;
        Ahead ahead;

        PELLUCID_INLINE F16 left(int r, int64_t k) const { return left_pack(x + r * x_stride + k); }
        PELLUCID_INLINE F16 right(int64_t k, int v) const {
            const auto* weights = vector_of<float>(panel, apart, v, k * kPanel + (v % 2) * 16);
            ahead.template fetch<Vectors>(reinterpret_cast<const std::byte*>(weights) - panel);
            return right_packs(weights);
        }
        PELLUCID_INLINE F16 multiply_add(F16 a, F16 b, F16 sum) const {
            return Float32Format::multiply_add(a, b, sum);
        }
    };
};

struct Bfloat16Format : InRegisters {
    using Number = bf16;
    static constexpr int kPack = 2;
    static constexpr int kCachedShift = 3;
#if defined(__AVX512BF16__)
    using Left = bf16;
    static void round(Left* to, float x) { *to = to_bf16(x); }

    static PELLUCID_INLINE __m512bh left_pack(const Left* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    }
    static PELLUCID_INLINE __m512bh right_packs(const Number* y) {
        return reinterpret_cast<__m512bh>(_mm512_loadu_si512(y));
    }
    static PELLUCID_INLINE __m512bh right_packs(const Number* y, int count) {
        return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi32(first_lanes(count), y));
    }
    static PELLUCID_INLINE F16 multiply_add(__m512bh a, __m512bh b, F16 sum) {
        return {_mm512_dpbf16_ps(sum.v, a, b)};
    }
#else  // kept as rounded floats; pairs of weights are widened as they are read
    using Left = float;
    static void round(Left* to, float x) { *to = to_float(to_bf16(x)); }

    static PELLUCID_INLINE F16Pair left_pack(const Left* x) { return {broadcast(x[0]), broadcast(x[1])}; }
    static PELLUCID_INLINE F16Pair right_packs(const Number* y) { return load_pairs(y); }
    static PELLUCID_INLINE F16Pair right_packs(const Number* y, int count) {
        bf16 padded[32] = {};
        std::memcpy(padded, y, 2 * count * sizeof *y);
        return load_pairs(padded);
    }
    static PELLUCID_INLINE F16 multiply_add(F16Pair a, F16Pair b, F16 sum) {
        return fma(a.second, b.second, fma(a.first, b.first, sum));
    }
#endif
    static constexpr int kRows = kTileRows, kWideRows = kWideTileRows, kOnceRows = std::min(kRows, 8);
    static constexpr bool kTakesFloats = false;

    static int64_t left_per_row(int64_t inputs) { return divide_up(inputs, 2) * 2; }
    static int64_t panel_bytes(int64_t inputs) { return divide_up(inputs, 2) * 2 * kPanel * 2; }
    static void prepare(const float* x, int64_t inputs, Left* row) {
        int64_t k = 0;
#if defined(__AVX512BF16__)
        for (; k + 16 <= inputs; k += 16) store(row + k, load(x + k));
#endif
        for (; k < inputs; ++k) round(row + k, x[k]);
        if (inputs % 2 != 0) round(row + inputs, 0.0f);
    }

    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply(const Left* x, int64_t x_stride, const std::byte* panel, int64_t apart,
                                         int64_t inputs, const Ahead& ahead, F16 (&sums)[Rows][Vectors]) {
        accumulate(Product<Vectors>{x, x_stride, panel, apart, ahead}, 0, divide_up(inputs, 2), sums);
    }

    template <int Vectors>
    struct Product {
        const Left* x;
        int64_t x_stride;
        const std::byte* panel;
        int64_t apart;
        Ahead ahead;

        PELLUCID_INLINE auto left(int r, int64_t k) const { return left_pack(x + r * x_stride + 2 * k); }
        PELLUCID_INLINE auto right(int64_t k, int v) const {
            const auto* weights = vector_of<bf16>(panel, apart, v, (k * kPanel + (v % 2) * 16) * 2);
            ahead.template fetch<Vectors>(reinterpret_cast<const std::byte*>(weights) - panel);
            return right_packs(weights);
        }
        template <class Pair>
        PELLUCID_INLINE F16 multiply_add(Pair a, Pair b, F16 sum) const {
            return Bfloat16Format::multiply_add(a, b, sum);
        }
    };
};

}  // namespace
}  // namespace pellucid
