// out[T, N] = x[T, K] weight[N, K]^T + bias[N], float32 in and out, weights float32 or bfloat16.
//
// Weights come packed in panels of 32 output columns, so that a tile reads them as one stream:
//   float32   [N / 32][K][32]
//   bfloat16  [N / 32][K / 2][32][2]      N and K padded with zeros to whole panels and pairs
// For bfloat16 weights x is rounded to bfloat16 once; products are accumulated in float32.
#include <memory>

#include "parallel.h"
#include "tile.h"

namespace pellucid {
namespace {

constexpr int kPanel = 32;

// A format says how one step of the sum reads activations and weights. `Left` is what a row of x is turned into.
struct Float32Format {
    using Weight = float;
    using Left = float;
    static constexpr int kStep = 1;  // values of K per step

    const float* x;
    int64_t x_stride;
    const float* panel;
    int64_t panel_size;

    PELLUCID_INLINE F16 left(int r, int64_t k) const { return broadcast(x[r * x_stride + k]); }
    PELLUCID_INLINE F16 right(int64_t k, int v) const {
        return load(panel + (v / 2) * panel_size + k * kPanel + (v % 2) * 16);
    }
    PELLUCID_INLINE F16 multiply_add(F16 a, F16 b, F16 sum) const { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)

struct Bfloat16Format {
    using Weight = bf16;
    using Left = bf16;
    static constexpr int kStep = 2;

    const bf16* x;
    int64_t x_stride;
    const bf16* panel;
    int64_t panel_size;

    PELLUCID_INLINE __m512bh left(int r, int64_t k) const {
        int32_t pair;
        std::memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
        return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    }
    PELLUCID_INLINE __m512bh right(int64_t k, int v) const {
        return reinterpret_cast<__m512bh>(
            _mm512_loadu_si512(panel + (v / 2) * panel_size + k * 2 * kPanel + (v % 2) * 32));
    }
    PELLUCID_INLINE F16 multiply_add(__m512bh a, __m512bh b, F16 sum) const {
        return {_mm512_dpbf16_ps(sum.v, a, b)};
    }
};

#else

// Without bfloat16 instructions: x is kept as rounded floats, pairs of weights are widened as they are read.
struct Bfloat16Format {
    using Weight = bf16;
    using Left = float;
    static constexpr int kStep = 2;

    const float* x;
    int64_t x_stride;
    const bf16* panel;
    int64_t panel_size;

    PELLUCID_INLINE F16Pair left(int r, int64_t k) const {
        const float* pair = x + r * x_stride + 2 * k;
        return {broadcast(pair[0]), broadcast(pair[1])};
    }
    PELLUCID_INLINE F16Pair right(int64_t k, int v) const {
        return load_pairs(panel + (v / 2) * panel_size + k * 2 * kPanel + (v % 2) * 32);
    }
    PELLUCID_INLINE F16 multiply_add(F16Pair a, F16Pair b, F16 sum) const {
        return fma(a.second, b.second, fma(a.first, b.first, sum));
    }
};

#endif

// One tile: Rows rows by Vectors * 16 columns, of which `columns` exist.
template <int Rows, int Vectors, class Format>
PELLUCID_INLINE void tile(const Format& format, int64_t steps, const float* bias, float* out, int64_t out_stride,
                          int64_t columns) {
    F16 sums[Rows][Vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[r][v] = broadcast(0.0f);
    accumulate(format, 0, steps, sums);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
        const int count = static_cast<int>(std::clamp<int64_t>(columns - 16 * v, 0, 16));
        const F16 offset = bias ? load(bias + 16 * v, count) : broadcast(0.0f);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const F16 value = bias ? sums[r][v] + offset : sums[r][v];
            store(out + r * out_stride + 16 * v, value, count);
        }
    }
}

template <class Format>
struct Linear {
    const typename Format::Left* x;  // [rows, x_stride]
    int64_t x_stride;
    const typename Format::Weight* weight;
    const float* bias;
    float* out;
    int64_t rows, inputs, outputs;

    int64_t steps() const { return (inputs + Format::kStep - 1) / Format::kStep; }
    int64_t panel_size() const { return steps() * Format::kStep * kPanel; }
    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }

    // Rows [row, row + count) by panels [first, last). Few rows take two panels at once, to keep the multipliers busy.
    void block(int64_t row, int64_t count, int64_t first, int64_t last) const {
        int64_t panel = first;
        if (count <= kWideTileRows)
            with_rows<kWideTileRows>(count, [&](auto height) {
                for (; panel + 2 <= last; panel += 2) one_tile<height, 4>(row, panel);
            });
        with_rows<kTileRows>(count, [&](auto height) {
            for (; panel < last; ++panel) one_tile<height, 2>(row, panel);
        });
    }

    template <int Rows, int Vectors>
    __attribute__((noinline)) void one_tile(int64_t row, int64_t panel) const {
        const Format format{x + row * x_stride, x_stride, weight + panel * panel_size(), panel_size()};
        const int64_t column = panel * kPanel;
        tile<Rows, Vectors>(format, steps(), bias ? bias + column : nullptr, out + row * outputs + column, outputs,
                            outputs - column);
    }

    void work(int threads) const {
        const EvenParts tiles(rows, kTileRows);
        const int64_t panels_per_unit = this->panels_per_unit(threads);
        const int64_t row_parts = std::clamp<int64_t>(rows / kTileRows / 8, 1, 8);
        const int64_t units = (panels() + panels_per_unit - 1) / panels_per_unit * row_parts;
        for_each_unit(threads, units, [&](int64_t unit, int) {
            const int64_t first = unit / row_parts * panels_per_unit, part = unit % row_parts;
            const int64_t last = std::min(first + panels_per_unit, panels());
            for (int64_t t = tiles.count * part / row_parts; t < tiles.count * (part + 1) / row_parts; ++t)
                block(tiles.begin(t), tiles.size(t), first, last);
        });
    }

    // Weights of one unit: a long run from memory when they are used once, what the L2 cache holds when many row tiles
    // use them again.
    int64_t panels_per_unit(int threads) const {
        const int64_t bytes = rows <= kTileRows ? 64 << 10 : 512 << 10;
        const int64_t fitting = bytes / (panel_size() * static_cast<int64_t>(sizeof(typename Format::Weight)));
        const int64_t balanced = (panels() + 2 * threads - 1) / (2 * threads);
        return std::max<int64_t>(1, std::min(fitting, balanced));
    }
};

int linear_threads(int threads, int64_t rows, int64_t inputs, int64_t outputs) {
    return useful_threads(threads, rows * inputs * outputs);
}

[[maybe_unused]] void round_to(bf16* out, float x) { *out = to_bf16(x); }
[[maybe_unused]] void round_to(float* out, float x) { *out = to_float(to_bf16(x)); }

}  // namespace
}  // namespace pellucid

using namespace pellucid;

// x [rows, inputs], weight packed as above, bias [outputs] or null, out [rows, outputs].
extern "C" void pellucid_linear_float32(const float* x, const float* weight, const float* bias, float* out,
                                        int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    const Linear<Float32Format> linear{x, inputs, weight, bias, out, rows, inputs, outputs};
    linear.work(linear_threads(threads, rows, inputs, outputs));
}

extern "C" void pellucid_linear_bfloat16(const float* x, const bf16* weight, const float* bias, float* out,
                                         int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    using Left = Bfloat16Format::Left;
    const int64_t stride = (inputs + 1) / 2 * 2;
    const std::unique_ptr<Left[]> rounded(new Left[rows * stride]);
    threads = linear_threads(threads, rows, inputs, outputs);
    for_each_unit(threads, rows, [&](int64_t row, int) {
        Left* to = rounded.get() + row * stride;
        for (int64_t k = 0; k < inputs; ++k) round_to(to + k, x[row * inputs + k]);
        if (stride > inputs) round_to(to + inputs, 0.0f);
    });
    Linear<Bfloat16Format>{rounded.get(), stride, weight, bias, out, rows, inputs, outputs}.work(threads);
}
