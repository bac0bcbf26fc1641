// Both products of attention in tiles (amx.h), where the cache is bfloat16 and heads are whole tiles long.
//
// Keys of a granule are right tiles as they lie, one for every 32 dimensions. Values of two granules, 32 keys from a
// multiple of 32 on, are right tiles where one granule follows the other in memory; elsewhere they are put together.
#pragma once

#include "aligned_vector.h"
#include "amx.h"
#include "attention_scores.h"
#include "attention_values.h"

#if defined(PELLUCID_AMX)

namespace pellucid {
namespace {

struct TiledCache : Bfloat16Format {
    static constexpr int kDimensions = 32;  // of a tile of keys
    static bool fits(const Arguments& a) { return a.head_dim % kDimensions == 0; }
};

constexpr int kTileKeys = 2 * kGranule;  // of a tile of values

template <>
struct Exponentials<TiledCache> {
    static constexpr int kKeys = kTileKeys;
    static constexpr bool kByTiles = true;

    // 2^x for what is rounded to 8 bits next: 2^floor(x) times a polynomial (minimax, fitted for this file; 2^-13 apart) of the
    // rest. 0 for -infinity.
    static PELLUCID_INLINE F16 of(F16 score, F16 largest, F16 scale) {
        const F16 x = (score - largest) * scale;
        const F16 rest{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF)};
        F16 p = broadcast(0.07706704f);
        p = fma(p, rest, broadcast(0.227645f));
        p = fma(p, rest, broadcast(0.69511676f));
        p = fma(p, rest, broadcast(1.0f));
        return {_mm512_scalef_ps(p.v, x.v)};
    }
    // As bfloat16, in the first half of the row.
    static PELLUCID_INLINE void put(float* row, int at, F16 weights) {
        store(reinterpret_cast<bf16*>(row) + at, weights);
    }
    static PELLUCID_INLINE void between_products() { keep_tiles_awake(); }
};

template <>
class Scores<TiledCache> {
public:
    static constexpr int kRows = 2 * kTileSide, kFetchingRows = kTileSide;
    static constexpr int kMemoryRows = 2 * kRows - 1;  // what lies behind the last row is written to

    void start(const Arguments& arguments, int64_t rows) {
        width_ = arguments.head_dim;
        q_.resize((rows + kRows - 1) * width_);  // tiles may reach beyond the last row
    }

    void set_query(int64_t r, const float* query) { TiledCache::prepare(query, width_, &q_[r * width_]); }

    // As for other formats. Of scores the rows beyond `count`, up to kRows, become anything.
    void run(int64_t row, int64_t count, const HeadGranules<bf16>& block, int first, int last, float* scores) const {
        const auto take = [&]<int Lefts, int Granules>() {
            score_granules<Lefts, Granules>(&q_[row * width_], block, first, scores + first * kGranule);
            first += Granules;
        };
        if (count <= kTileSide) {
            while (last - first >= 4) take.template operator()<1, 4>();
            while (last - first >= 2) take.template operator()<1, 2>();
            if (last > first) take.template operator()<1, 1>();
        } else {
            while (last - first >= 2) take.template operator()<2, 2>();
            if (last > first) take.template operator()<2, 1>();
        }
    }

private:
    template <int Lefts, int Granules>
    __attribute__((noinline)) void score_granules(const bf16* q, const HeadGranules<bf16>& block, int first,
                                                  float* scores) const {
        const TileSums<Lefts, Granules, Keeps::kLeft> sums;
        for (int64_t d = 0; d < width_; d += TiledCache::kDimensions) {
            if constexpr (Lefts == 1)  // of few rows, which wait for memory
                for (int j = 0; j < Granules; ++j)
                    for (int line = 0; line < kTileSide; ++line)
                        prefetch_to_l2(block.fetched.keys[first + j] + d * kGranule + line * (kTileBytes / sizeof(bf16)));
            sums.add([&](int i) { return q + i * kTileSide * width_ + d; }, width_ * sizeof(bf16),
                     [&](int j) { return block.here.keys[first + j] + d * kGranule; }, kTileBytes);
        }
        sums.store(scores, kBlock);
    }

    int64_t width_ = 0;    // of a head
    AlignedVector<bf16> q_;  // [rows, width]
};

template <>
class ValueSum<TiledCache> {
public:
    // As for other formats. What a row does not see has the weight 0, which adds nothing as long as the values are finite;
    // where they are not, rows go one by one, and what each does not see is taken out.
    void run(const Arguments& arguments, const HeadGranules<bf16>& block, const float* exponentials,
             const SeenKeys& seen, int64_t count, float* out) {
        width_ = arguments.head_dim;
        block_ = &block;
        Range common = seen.common;
        const Range any = seen.any;
        if (any.empty()) {
            std::fill_n(out, count * width_, 0.0f);
            return;
        }
        used_ = {any.begin / kGranule, (any.end - 1) / kGranule + 1};
        weights_ = reinterpret_cast<const bf16*>(exponentials);
        const Range read{used_.begin * kGranule, used_.end * kGranule};
        if (common.empty()) common = {read.end, read.end};
        const Range before{read.begin, (common.begin + 1) / 2 * 2}, behind{common.end / 2 * 2, read.end};  // whole pairs
        if (are_finite(block.here, before, width_) && are_finite(block.here, behind, width_)) {
            find_values();
            multiply(0, count, out);
            return;
        }
        for (int64_t r = 0; r < count; ++r) {
            hide_all_but(seen.rows[r]);
            multiply(r, 1, out + r * width_);
        }
    }

private:
    Range used_tiles() const { return {used_.begin / 2, (used_.end - 1) / 2 + 1}; }

    int64_t granule_size() const { return kGranule * width_; }

    // Where tiles of values begin.
    void find_values() {
        const Range tiles = used_tiles();
        for (int t = tiles.begin; t < tiles.end; ++t) {
            const bf16* const* granules = &block_->here.values[2 * t];
            const bool both = used_.holds(2 * t) && used_.holds(2 * t + 1);
            values_[t] = both && granules[1] == granules[0] + granule_size() ? granules[0] : put_together(t);
        }
    }

    // A copy of tile t, with zeros for what nobody sees.
    bf16* put_together(int t) {
        together_.resize(kGranules * granule_size());
        bf16* const copy = &together_[2 * t * granule_size()];
        for (int g = 2 * t; g < 2 * t + 2; ++g) {
            bf16* const to = &together_[g * granule_size()];
            if (used_.holds(g))
                std::copy_n(block_->here.values[g], granule_size(), to);
            else
                std::fill_n(to, granule_size(), bf16{});
        }
        return copy;
    }

    // Takes copies of all values, without those of keys that a row does not see.
    void hide_all_but(Range seen) {
        const Range tiles = used_tiles();
        for (int t = tiles.begin; t < tiles.end; ++t) {
            bf16* const copy = put_together(t);
            values_[t] = copy;
            for (int key = 0; key < kTileKeys; ++key) {
                if (seen.holds(t * kTileKeys + key)) continue;
                for (int64_t d = 0; d < width_; ++d) copy[(key / 2 * width_ + d) * 2 + key % 2] = {};
            }
        }
    }

    // out [count, width] of rows `row` to row + count - 1.
    void multiply(int64_t row, int64_t count, float* out) {
        const auto take = [&]<int Lefts, int Rights>(int64_t d) {
            if (count == Lefts * kTileSide) return add_values<Lefts, Rights>(row, d, out + d, width_);
            alignas(64) float sums[Lefts * kTileSide][Rights * kTileSide];
            add_values<Lefts, Rights>(row, d, sums[0], Rights * kTileSide);
            for (int64_t r = 0; r < count; ++r) std::copy_n(sums[r], Rights * kTileSide, out + r * width_ + d);
        };
        int64_t d = 0;
        if (count <= kTileSide) {
            for (; width_ - d >= 64; d += 64) take.template operator()<1, 4>(d);
            for (; d < width_; d += 32) take.template operator()<1, 2>(d);
        } else {
            for (; d < width_; d += 32) take.template operator()<2, 2>(d);
        }
    }

    template <int Lefts, int Rights>
    __attribute__((noinline)) void add_values(int64_t row, int64_t d, float* out, int64_t out_step) const {
        const TileSums<Lefts, Rights, Keeps::kLeft> sums;
        const Range tiles = used_tiles();
        for (int t = tiles.begin; t < tiles.end; ++t) {
            if constexpr (Lefts == 1)
                for (int g = std::max(2 * t, used_.begin); g < std::min(2 * t + 2, used_.end); ++g)
                    for (int pair = 0; pair < kGranule / 2; ++pair)
                        for (int j = 0; j < Rights; ++j)
                            prefetch_to_l2(block_->fetched.values[g] + 2 * (pair * width_ + d + j * kTileSide));
            sums.add([&](int i) { return weights_ + (row + i * kTileSide) * kWeightStep + t * kTileKeys; },
                     kWeightStep * sizeof(bf16), [&](int j) { return values_[t] + 2 * (d + j * kTileSide); },
                     2 * width_ * sizeof(bf16));
        }
        sums.store(out, out_step);
    }

    static constexpr int64_t kWeightStep = kBlock * sizeof(float) / sizeof(bf16);

    const HeadGranules<bf16>* block_ = nullptr;
    int64_t width_ = 0;                            // of a head
    Range used_{0, 0};                             // granules of which some row sees something
    const bf16* values_[kBlock / kTileKeys] = {};  // where tiles begin
    AlignedVector<bf16> together_;                 // copies of a block's values
    const bf16* weights_ = nullptr;                // [rows, kWeightStep]
};

}  // namespace
}  // namespace pellucid

#endif
