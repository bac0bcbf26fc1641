// Integer formats of linear weights in tiles (amx.h). See linear.cpp for what a format is, linear_tiles.h for how tiles lie.
#pragma once

#include "linear_tiles.h"
#include "quantized_formats.h"

#if defined(PELLUCID_AMX)

namespace pellucid {
namespace {

PELLUCID_INLINE I16 load_integers(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
PELLUCID_INLINE I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PELLUCID_INLINE void store_bytes(void* p, Bytes x) { _mm512_storeu_si512(p, x.v); }

// Activations are numbers of 15 bits with one scale for a row: two digits, a = 128 high + low, so that a row's sums are whole
// numbers to the end. (In groups of 64 with scales of their own, as elsewhere, much is done between tiles.)
//
//   row: two halves of as many lines of the cache. High digits [K], padded with zeros to whole lines, then Factors; low
//        digits, padded too. So the digits of eight rows are the rows of a tile as well.
struct TiledInt8Format : InTiles {
    static constexpr int kRows = kTileSide, kWideRows = kTileSide / 2, kWideStep = kWideRows, kOnceRows = kRows;
    static constexpr int kCachedShift = Int8Format::kCachedShift;
    static constexpr bool kTakesFloats = false;
    static constexpr int64_t kMostInputs = 1 << 17;  // of which sums fit into 32 bits

    struct alignas(kTileBytes) Left {  // a line
        Activation values[kTileBytes];
    };
    struct Factors {
        float scale;
        int32_t high, low;  // -128 times the sum of digits, since weights are unsigned
    };

    static int64_t lines(int64_t inputs) { return divide_up(inputs, kTileBytes); }
    static int64_t half_row(int64_t inputs) { return (lines(inputs) + 1) | 1; }  // odd, as for bfloat16
    static int64_t left_per_row(int64_t inputs) { return 2 * half_row(inputs); }
    static int64_t panel_bytes(int64_t inputs) { return Int8Format::panel_bytes(inputs); }

    static void prepare(const float* x, int64_t inputs, Left* row) {
        const Scale scale(x, inputs, kMostWhole);
        auto *high = row->values, *low = row[half_row(inputs)].values;
        int32_t high_sum = 0, low_sum = 0;
        for (int64_t k = 0; k < inputs; ++k) {
            const int32_t whole = scale.round(x[k]), digit = (whole + kDigit / 2) >> 7;
            high[k] = static_cast<Activation>(digit);
            low[k] = static_cast<Activation>(whole - kDigit * digit);
            high_sum += digit;
            low_sum += whole - kDigit * digit;
        }
        const int64_t padding = lines(inputs) * kTileBytes - inputs;
        std::fill_n(high + inputs, padding, Activation{});
        std::fill_n(low + inputs, padding, Activation{});
        *reinterpret_cast<Factors*>(row + lines(inputs)) = {scale.scale, -128 * high_sum, -128 * low_sum};
    }

    // out [count, 16 * Vectors], count <= Rows
    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply_tiles(const Left* x, int64_t x_stride, int64_t count, const std::byte* panel,
                                               int64_t apart, int64_t inputs, bool again, const Ahead& ahead, float* out) {
        static_assert(Rows * Vectors == 2 * kTileSide);
        alignas(kTileBytes) int32_t sums[Rows * 2 * Vectors * 16];  // [rows][2][columns]
        before_tiles();
        if constexpr (Vectors == 4)
            multiply_wide(x, panel, apart, inputs, sums);
        else if (again)
            multiply<Keeps::kRight>(x, panel, inputs, ahead, sums);
        else
            multiply<Keeps::kLeft>(x, panel, inputs, ahead, sums);
        const auto* factors = x + lines(inputs);
        for (int64_t r = 0; r < count; ++r, factors += x_stride) {
            const auto& row = *reinterpret_cast<const Factors*>(factors);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v, out += 16) {
                const int32_t* const high = sums + (r * 2 * Vectors + v) * 16;
                const F16 a = to_float(load_integers(high) + broadcast_integer(row.high));
                const F16 b = to_float(load_integers(high + Vectors * 16) + broadcast_integer(row.low));
                const auto* scales = vector_of<float>(panel, apart, v, lines(inputs) * kLineBytes / 4 + v % 2 * 16);
                store(out, fma(a, broadcast(float{kDigit}), b) * broadcast(row.scale) * load(scales));
            }
        }
    }

private:
    static constexpr int32_t kDigit = 128;
    static constexpr int64_t kLineBytes = kTileBytes * kPanel;  // of a panel, for a line of a row

    // Sixteen rows and a panel. High digits are tile 4, low ones 5.
    template <Keeps Kept>
    static PELLUCID_INLINE void multiply(const Left* x, const std::byte* panel, int64_t inputs, const Ahead& ahead,
                                         int32_t* sums) {
        constexpr bool kLeftPasses = Kept == Keeps::kRight, kRightPasses = !kLeftPasses;
        const int64_t half = half_row(inputs), step = 2 * half * sizeof(Left);
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        for (int64_t line = 0; line < lines(inputs); ++line, ++x) {
            const std::byte* const right = panel + line * kLineBytes;
            ahead.fetch<2>(line * kLineBytes, kLineBytes);
            load_tile<6, kRightPasses>(right, kPanelStep);
            load_tile<4, kLeftPasses>(x, step);
            add_integer_tiles<0, 4, 6>();
            load_tile<5, kLeftPasses>(x + half, step);
            add_integer_tiles<2, 5, 6>();
            load_tile<7, kRightPasses>(right + kTileBytes, kPanelStep);
            add_integer_tiles<1, 4, 7>();
            add_integer_tiles<3, 5, 7>();
        }
        store_sums(sums);
    }

    // Eight rows and two panels. The digits of a row are two rows of tile 4.
    static PELLUCID_INLINE void multiply_wide(const Left* x, const std::byte* panel, int64_t apart, int64_t inputs,
                                              int32_t* sums) {
        const int64_t step = half_row(inputs) * sizeof(Left);
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        for (int64_t line = 0; line < lines(inputs); ++line, ++x) {
            const std::byte *const right = panel + line * kLineBytes, *const other = right + apart;
            fetch_far_ahead(right, kLineBytes);
            fetch_far_ahead(other, kLineBytes);
            load_tile<4>(x, step);
            load_tile<5, true>(right, kPanelStep);
            add_integer_tiles<0, 4, 5>();
            load_tile<6, true>(right + kTileBytes, kPanelStep);
            add_integer_tiles<1, 4, 6>();
            load_tile<7, true>(other, kPanelStep);
            add_integer_tiles<2, 4, 7>();
            load_tile<5, true>(other + kTileBytes, kPanelStep);
            add_integer_tiles<3, 4, 5>();
        }
        store_sums(sums);
    }

    // Tiles 0 to 3 side by side.
    static PELLUCID_INLINE void store_sums(int32_t* sums) {
        constexpr int64_t kStep = 4 * kTileBytes;
        store_tile<0>(sums, kStep), store_tile<1>(sums + 16, kStep);
        store_tile<2>(sums + 32, kStep), store_tile<3>(sums + 48, kStep);
    }
};

// More rows than these take less time in tiles than in registers.
constexpr int64_t kFewInt4Rows = 12;

// For many rows. The sums of a group are exact in any order: tiles compute them. What is rounded happens in registers, in the
// same order as in Int4Format, the one for few rows.
//
// A left tile has the values of two groups. The right one of the first group has zeros below, that of the second above.
struct TiledInt4Format : InTiles {
    static constexpr int kGroup = Int4Format::kGroup, kCachedShift = Int4Format::kCachedShift;
    static constexpr int kRows = 2 * kTileSide, kWideRows = 0, kOnceRows = kTileSide;
    static constexpr bool kTakesFloats = false;

    // A row's values, and then the factors of its groups. Tiles consist of whole lines of the cache: to read them takes a
    // fifth of the time that it takes otherwise.
    struct alignas(kTileBytes) Left {
        Activation values[kTileBytes];
    };
    struct Factors {
        float scale, correction;
    };

    static int64_t group_count(int64_t inputs) { return divide_up(inputs, kGroup); }
    static int64_t value_lines(int64_t inputs) { return divide_up(inputs, kTileBytes); }
    static int64_t left_per_row(int64_t inputs) {  // odd, as for bfloat16
        return (value_lines(inputs) + divide_up(group_count(inputs) * sizeof(Factors), kTileBytes)) | 1;
    }
    static int64_t panel_bytes(int64_t inputs) { return Int4Format::panel_bytes(inputs); }

    static void prepare(const float* x, int64_t inputs, Left* row) {
        auto* values = reinterpret_cast<Activation*>(row);
        auto* factors = reinterpret_cast<Factors*>(row + value_lines(inputs));
        for (int64_t k = 0; k < inputs; k += kGroup, ++factors) {
            Int4Format::Left group;
            Int4Format::prepare(x + k, std::min<int64_t>(kGroup, inputs - k), &group);
            std::copy_n(group.values, kGroup, values + k);
            *factors = {group.scale, group.correction};
        }
    }

    // out [count, 32], count <= Rows. A step is two groups of 16 rows. While registers add up what tiles have left, those
    // multiply for the next one.
    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply_tiles(const Left* x, int64_t x_stride, int64_t count, const std::byte* panel,
                                               int64_t, int64_t inputs, bool, const Ahead& ahead, float* out) {
        static_assert(Vectors == 2);
        constexpr int kLefts = Rows / kTileSide;
        const int64_t groups = group_count(inputs), steps = divide_up(groups, 2) * kLefts;
        Workspace workspace;
        const std::byte* right[2];
        const auto multiply = [&](auto second, int64_t step) {
            const int64_t group = step / kLefts * 2 + second, i = step % kLefts;
            if (group >= groups) return;
            if (i == 0) {
                ahead.fetch<Vectors>(group * kGroupBytes, kGroupBytes);
                right[second] = right_rows<second>(panel, group, workspace);
            }
            const Left* left = x + i * kTileSide * x_stride + group * kGroup / kTileBytes;
            multiply_group<second>(left, x_stride, right[second]);
        };
        const auto add = [&](int64_t step, const int32_t* whole) {
            const int64_t group = step / kLefts * 2, row = step % kLefts * kTileSide;
            const int64_t rows = std::min<int64_t>(count - row, kTileSide);
            const Left* factors = x + row * x_stride + value_lines(inputs);
            if (group + 1 < groups)
                add_groups<2>(panel, group, factors, x_stride, rows, whole, out + row * kPanel);
            else
                add_groups<1>(panel, group, factors, x_stride, rows, whole, out + row * kPanel);
        };
        constexpr std::integral_constant<int, 0> kFirst;
        constexpr std::integral_constant<int, 1> kSecond;
        alignas(kTileBytes) int32_t whole[kTileSide * kWholeStep];
        for (int64_t i = 0; i < count * kPanel; i += 16) store(out + i, broadcast(0.0f));
        before_tiles();
        multiply(kFirst, 0);
        multiply(kSecond, 0);
        for (int64_t step = 0; step < steps; ++step) {
            store_group<0>(whole);
            multiply(kFirst, step + 1);
            store_group<1>(whole);
            multiply(kSecond, step + 1);
            add(step, whole);
        }
    }

private:
    static constexpr int64_t kGroupBytes = Int4Format::kGroupBytes;
    static constexpr int64_t kWholeStep = 2 * kPanel;  // from a row of a step's sums to the next one

    struct alignas(kTileBytes) Workspace {
        static constexpr int64_t kBytes = kTileSide / 2 * kPanelStep;
        std::byte first[kBytes], zeros[kBytes] = {}, second[kBytes];
    };
    template <int Second>
    static PELLUCID_INLINE const std::byte* right_rows(const std::byte* panel, int64_t group, Workspace& to) {
        unpack(panel + group * kGroupBytes + Int4Format::kScaleBytes, Second ? to.second : to.first);
        before_tiles();
        return Second ? to.zeros : to.first;
    }
    static PELLUCID_INLINE void unpack(const std::byte* packed, std::byte* rows) {
        for (int k = 0; k < kGroup / 8; ++k, packed += kPanelStep, rows += 2 * kPanelStep)
#pragma GCC unroll 2
            for (int64_t v = 0; v < kPanelStep; v += kTileBytes) {
                Bytes low, high;
                load_nibbles(reinterpret_cast<const uint8_t*>(packed + v), low, high);
                store_bytes(rows + v, low);
                store_bytes(rows + kPanelStep + v, high);
            }
    }

    // Sums of the first group are tiles 0 and 1, of the second one 2 and 3.
    template <int Second>
    static PELLUCID_INLINE void multiply_group(const Left* left, int64_t x_stride, const std::byte* right) {
        constexpr int kSums = 2 * Second, kLeft = 4 + Second;
        clear_tile<kSums>();
        clear_tile<kSums + 1>();
        load_tile<kLeft>(left, x_stride * sizeof(Left));
        load_tile<6>(right, kPanelStep);
        add_integer_tiles<kSums, kLeft, 6>();
        load_tile<7>(right + kTileBytes, kPanelStep);
        add_integer_tiles<kSums + 1, kLeft, 7>();
    }
    template <int Second>
    static PELLUCID_INLINE void store_group(int32_t* whole) {
        store_tile<2 * Second>(whole + Second * kPanel, kWholeStep * sizeof *whole);
        store_tile<2 * Second + 1>(whole + Second * kPanel + 16, kWholeStep * sizeof *whole);
    }

    struct Columns {
        F16 scale[2], minimum[2];
    };
    static PELLUCID_INLINE Columns columns_of(const std::byte* panel, int64_t group) {
        const auto* scales = reinterpret_cast<const half*>(panel + group * kGroupBytes);
        return {{load(scales), load(scales + 16)}, {load(scales + kPanel), load(scales + kPanel + 16)}};
    }
    static PELLUCID_INLINE F16 add_group(F16 sum, I16 whole, const Factors& row, const Columns& columns, int v) {
        const F16 product = to_float(whole) * broadcast(row.scale) * columns.scale[v];
        return sum + (product + columns.minimum[v] * broadcast(row.correction));
    }

    // whole [rows, kWholeStep] to out [rows, 32]
    template <int Groups>
    static PELLUCID_INLINE void add_groups(const std::byte* panel, int64_t group, const Left* factors, int64_t x_stride,
                                           int64_t rows, const int32_t* whole, float* out) {
        Columns columns[Groups];
        for (int g = 0; g < Groups; ++g) columns[g] = columns_of(panel, group + g);
#pragma GCC unroll 2
        for (int64_t r = 0; r < rows; ++r, factors += x_stride, whole += kWholeStep, out += kPanel) {
            const Factors* const row = reinterpret_cast<const Factors*>(factors) + group;
            F16 sums[2] = {load(out), load(out + 16)};
#pragma GCC unroll 2
            for (int g = 0; g < Groups; ++g)
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v)
                    sums[v] = add_group(sums[v], load_integers(whole + g * kPanel + v * 16), row[g], columns[g], v);
            store(out, sums[0]);
            store(out + 16, sums[1]);
        }
    }
};

}  // namespace
}  // namespace pellucid

#endif
