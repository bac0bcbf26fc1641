// AMX: a core's matrix unit, which multiplies registers of 16 rows by 64 bytes ("tiles"). One instruction adds the product of
// a left tile, 16 rows of x, and a right one, 16 columns of weights as they lie in packs, to a tile of 16 x 16 sums:
//
//   bfloat16  sum += (x0 w0 + x2 w2 + … + x30 w30) + (x1 w1 + x3 w3 + … + x31 w31), each bracket a chain of fused
//             multiply-adds that begins at 0. Subnormal numbers count as 0
//   int8      sum += x0 w0 + … + x63 w63, exact
//
// A row's sums do not depend on what the other rows hold, so operators compute whole tiles and leave out what they do not need.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__)
#define PELLUCID_AMX 1

namespace pellucid {

// This thread's tiles have 16 rows of 64 bytes from the first enter_tiles until it has left as often.
void enter_tiles();
void leave_tiles();

namespace {

constexpr int kTileSide = 16;       // rows of a left tile, columns of a right one
constexpr int64_t kTileBytes = 64;  // of a row

// For as long as it lives, if `Used`. Nested ones cost next to nothing.
template <bool Used = true>
struct UsingTiles {
    UsingTiles() {
        if constexpr (Used) enter_tiles();
    }
    ~UsingTiles() {
        if constexpr (Used) leave_tiles();
    }
    UsingTiles(const UsingTiles&) = delete;
};

// Tiles by number, which is part of an instruction.
template <int Tile>
PELLUCID_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
// step: bytes from one row to the next. Passing: what is read leaves the nearest cache to what is read again.
template <int Tile, bool Passing = false>
PELLUCID_INLINE void load_tile(const void* from, int64_t step) {
    if constexpr (Passing)
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(Tile));
    else
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(Tile));
}
template <int Tile>
PELLUCID_INLINE void store_tile(void* to, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(Tile) : "memory");
}
template <int Sum, int Left, int Right>
PELLUCID_INLINE void add_bfloat16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}
template <int Sum, int Left, int Right>  // signed times unsigned
PELLUCID_INLINE void add_integer_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

// A unit without work for 0.6 us falls asleep, and its next products take 0.26 us longer (measured on a Xeon with AMX). One
// now and then keeps it awake. To be called where no tile holds anything of use.
PELLUCID_INLINE void keep_tiles_awake() { add_bfloat16_tiles<0, 6, 7>(); }

// The compiler does not know what tiles are loaded from: that has been written by now.
PELLUCID_INLINE void before_tiles() { asm volatile("" ::: "memory"); }

// Which side of a product is read again soon, and so is kept in the nearest cache.
enum class Keeps { kLeft, kRight };

// sums [16 * Lefts, 16 * Rights] of bfloat16 products, in tiles 0 to 3.
template <int Lefts, int Rights, Keeps Kept>
class TileSums {
    static_assert(Lefts * Rights <= 4 && Lefts <= 2);

public:
    TileSums() {
        before_tiles();
        clear_tile<0>();
        if constexpr (kCount > 1) clear_tile<1>();
        if constexpr (kCount > 2) clear_tile<2>(), clear_tile<3>();
    }

    // left(i), right(j): where the first row of a tile lies; from there to the next one are so many bytes.
    template <class Left, class Right>
    PELLUCID_INLINE void add(const Left& left, int64_t left_step, const Right& right, int64_t right_step) const {
        constexpr bool kLeftPasses = Kept == Keeps::kRight, kRightPasses = !kLeftPasses;
        load_tile<4, kLeftPasses>(left(0), left_step);
        load_tile<6, kRightPasses>(right(0), right_step);
        add_bfloat16_tiles<0, 4, 6>();
        if constexpr (Rights > 1) {
            load_tile<7, kRightPasses>(right(1), right_step);
            add_bfloat16_tiles<1, 4, 7>();
        }
        if constexpr (Rights > 2) {
            load_tile<5, kRightPasses>(right(2), right_step);
            add_bfloat16_tiles<2, 4, 5>();
            load_tile<6, kRightPasses>(right(3), right_step);
            add_bfloat16_tiles<3, 4, 6>();
        }
        if constexpr (Lefts > 1) {
            load_tile<5, kLeftPasses>(left(1), left_step);
            add_bfloat16_tiles<Rights, 5, 6>();
            if constexpr (Rights > 1) add_bfloat16_tiles<3, 5, 7>();
        }
    }

    // to [16 * Lefts, step]
    PELLUCID_INLINE void store(float* to, int64_t step) const {
        const int64_t bytes = step * static_cast<int64_t>(sizeof(float));
        store_tile<0>(to, bytes);
        if constexpr (Rights > 1) store_tile<1>(to + kTileSide, bytes);
        if constexpr (Rights > 2) store_tile<2>(to + 2 * kTileSide, bytes), store_tile<3>(to + 3 * kTileSide, bytes);
        if constexpr (Lefts > 1) {
            store_tile<Rights>(to + kTileSide * step, bytes);
            if constexpr (Rights > 1) store_tile<3>(to + kTileSide * step + kTileSide, bytes);
        }
    }

private:
    static constexpr int kCount = Lefts * Rights;
};

}  // namespace
}  // namespace pellucid

#else

namespace pellucid {
namespace {

template <bool = false>
struct UsingTiles {
    UsingTiles() {}
};

}  // namespace
}  // namespace pellucid

#endif
