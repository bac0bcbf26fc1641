// Linear layers in tiles (amx.h). See linear.cpp for what a format is.
//
// Weights lie as they do for other CPUs: 16 packs of a panel, one below the other, are two right tiles side by side. Rows of
// x are left tiles as they lie.
#pragma once

#include "amx.h"
#include "linear_formats.h"

#if defined(PELLUCID_AMX)

namespace pellucid {
namespace {

constexpr int64_t kPanelStep = 2 * kTileBytes;  // from one row of a panel's tiles to the next

// Tiles two panels wide are of few rows, which wait for memory: what lies so far ahead is fetched while they multiply.
constexpr int64_t kFarAhead = 2 << 10;
PELLUCID_INLINE void fetch_far_ahead(const std::byte* panel, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_to_l2(panel + kFarAhead + i);
}

// Several times as fast: weights are read twice only where that is hidden behind many rows.
struct InTiles {
    static constexpr int kStep = kTileSide, kWideStep = kTileSide;
    static constexpr int64_t kRowsApart = 192, kHeldRowBytes = 1 << 20, kFinishedRows = 8;
    static PELLUCID_INLINE void between_products() { keep_tiles_awake(); }
};

// Sums of bfloat16 go through tiles for any number of rows, since they are rounded in another order than in registers.
struct TiledBfloat16Format : Bfloat16Format, InTiles {
    using InTiles::kStep, InTiles::kWideStep, InTiles::kRowsApart, InTiles::kHeldRowBytes, InTiles::kFinishedRows,
        InTiles::between_products;
    static constexpr int kRows = 2 * kTileSide, kWideRows = kTileSide, kOnceRows = kWideRows;
    static constexpr int64_t kInputs = 32;  // of a tile

    // An odd number of tiles, so that the rows of one lie in different sets of the nearest cache.
    static int64_t left_per_row(int64_t inputs) { return (divide_up(inputs, kInputs) | 1) * kInputs; }

    static void prepare(const float* x, int64_t inputs, Left* row) {
        Bfloat16Format::prepare(x, inputs, row);
        const int64_t end = Bfloat16Format::left_per_row(inputs);
        std::fill(row + end, row + divide_up(inputs, kInputs) * kInputs, Left{});
    }

    // out [Rows, 16 * Vectors]
    template <int Rows, int Vectors>
    static PELLUCID_INLINE void multiply_tiles(const Left* x, int64_t x_stride, int64_t, const std::byte* panel,
                                               int64_t apart, int64_t inputs, bool again, const Ahead& ahead, float* out) {
        const auto multiply = [&]<Keeps Kept>() {
            multiply_tiles<Rows, Vectors, Kept>(x, x_stride, panel, apart, inputs, ahead, out);
        };
        again ? multiply.template operator()<Keeps::kRight>() : multiply.template operator()<Keeps::kLeft>();
    }

private:
    template <int Rows, int Vectors, Keeps Kept>
    static PELLUCID_INLINE void multiply_tiles(const Left* x, int64_t x_stride, const std::byte* panel, int64_t apart,
                                               int64_t inputs, const Ahead& ahead, float* out) {
        const TileSums<Rows / kTileSide, Vectors, Kept> sums;
        const int64_t packs = divide_up(inputs, 2), whole = packs / kTileSide * kTileSide;
        const auto add = [&](int64_t pack, const std::byte* first, int64_t second) {
            sums.add([&](int i) { return x + i * kTileSide * x_stride + 2 * pack; }, x_stride * sizeof(Left),
                     [&](int j) { return first + (j / 2) * second + j % 2 * kTileBytes; }, kPanelStep);
        };
        for (int64_t pack = 0; pack < whole; pack += kTileSide) {
            const int64_t at = pack * kPanelStep;
            ahead.fetch<Vectors>(at, kTileSide * kPanelStep);
            if constexpr (Vectors > 2) {
                fetch_far_ahead(panel + at, kTileSide * kPanelStep);
                fetch_far_ahead(panel + apart + at, kTileSide * kPanelStep);
            }
            add(pack, panel + at, apart);
        }
        if (whole < packs) {  // what lies behind a panel is another one
            constexpr int64_t kBytes = kTileSide * kPanelStep;
            alignas(64) std::byte last[kBytes * (Vectors / 2)] = {};
            for (int64_t p = 0; p < Vectors / 2; ++p)
                std::memcpy(last + p * kBytes, panel + p * apart + whole * kPanelStep, (packs - whole) * kPanelStep);
            before_tiles();
            add(whole, last, kBytes);
        }
        sums.store(out, 16 * Vectors);
    }
};

}  // namespace
}  // namespace pellucid

#endif
