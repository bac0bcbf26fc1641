// The second product of attention: exponentials times values, over a block of keys.
#pragma once

#include "aligned_vector.h"
#include "attention_granules.h"
#include "parallel.h"
#include "tile.h"

namespace pellucid {
namespace {

constexpr int kChains = 4;  // of a row's only vector

// How the weights of a row's values are made, and where they are put.
template <class Format>
struct Exponentials {
    static constexpr int kKeys = kGranule;  // that are multiplied together
    static constexpr bool kByTiles = false;

    // Subtracted before it is multiplied and rounded: the largest exponential is 1 however large the scores are.
    static PELLUCID_INLINE F16 of(F16 score, F16 largest, F16 scale) { return exp2((score - largest) * scale); }
    // Of 16 keys, in the place of their scores.
    static PELLUCID_INLINE void put(float* row, int at, F16 weights) { store(row + at, weights); }
    // To be called now and then between the two products.
    static PELLUCID_INLINE void between_products() {}
};

// sums[r] += weight[r][key] * value[key] over a granule: 16 dimensions per vector, one chain over the keys.
template <class Format, bool Whole>
struct ValueProduct {
    using Number = typename Format::Number;
    const typename Format::Left* weights;  // [rows, kBlock], from the granule's first key
    const Number *values, *ahead;          // from the first vector's dimension
    int64_t width;
    int count;  // dimensions of the only vector, where it is not whole

    PELLUCID_INLINE auto left(int r, int64_t k) const {
        return Format::left_pack(weights + r * kBlock + k * Format::kPack);
    }
    PELLUCID_INLINE auto right(int64_t k, int v) const {
        const int64_t offset = (k * width + kGranule * v) * Format::kPack;
        prefetch(ahead + offset);
        if constexpr (Whole) return Format::right_packs(values + offset);
        return Format::right_packs(values + offset, count);
    }
    template <class Pack>
    PELLUCID_INLINE F16 multiply_add(Pack a, Pack b, F16 sum) const {
        return Format::multiply_add(a, b, sum);
    }
};

// Which keys of a block some rows see, from its start: each row, all of them, and from the first to the last that any of
// them sees.
struct SeenKeys {
    const Range* rows;
    Range common{0, kBlock}, any{kBlock, 0};

    SeenKeys(const Range* rows, int64_t count) : rows(rows) {
        for (const Range* row = rows; row < rows + count; ++row) {
            common = common.clip(row->begin, row->end);
            if (!row->empty()) any = {std::min(any.begin, row->begin), std::max(any.end, row->end)};
        }
    }
    SeenKeys(const Range* rows, Range common, Range any) : rows(rows), common(common), any(any) {}
    // Of rows that see the whole block.
    static SeenKeys whole(const Range* rows) { return {rows, {0, kBlock}, {0, kBlock}}; }
    SeenKeys from(int64_t row) const { return {rows + row, common, any}; }
};

// Whether the values of these keys, whole packs, are. width: of a token in the cache.
template <class Number>
bool are_finite(const Granules<Number>& block, Range keys, int64_t width) {
    for (int32_t key = keys.begin; key < keys.end;) {
        const int32_t end = std::min(keys.end, (key / kGranule + 1) * kGranule);
        if (!is_finite(block.values[key / kGranule] + key % kGranule * width, (end - key) * width)) return false;
        key = end;
    }
    return true;
}

template <class Format>
class ValueSum {
    using Left = typename Format::Left;
    using Number = typename Format::Number;

public:
    // out[r] = sum of exponential[r][key] * value[key] over the keys that row r of `count` sees. exponentials
    // [count, kBlock], out [count, head_dim in whole vectors].
    //
    // Packs of keys that some row sees go through one tile: what a row does not see has the weight 0, which adds nothing
    // as long as the values are finite. Where they are not, the tile has the packs that all rows see, and the ragged
    // ends before and after them go row by row, so that the chains of each row stay in key order.
    void run(const Arguments& arguments, const HeadGranules<Number>& block, const float* exponentials,
             const SeenKeys& seen, int64_t count, float* out) {
        a_ = &arguments;
        block_ = &block;
        stride_ = one_vector() ? kChains * 16 : divide_up(a_->head_dim, 16) * 16;
        width_ = HeadLayout<Format>(a_->head_dim, a_->block_size).width;
        const Left* weights = prepared_weights(exponentials, count);
        float* sums = one_vector() ? chains_ : out;
        std::fill_n(sums, count * stride_, 0.0f);
        Range common = seen.common, any = seen.any;
        common = {whole_packs(common.begin + Format::kPack - 1), whole_packs(common.end)};
        any = {whole_packs(any.begin), whole_packs(any.end + Format::kPack - 1)};
        if (common.empty()) common = {any.end, any.end};
        if (all_finite({any.begin, common.begin}) && all_finite({common.end, any.end})) {
            if (!any.empty()) add_values(weights, count, any, block.here.values, sums);
        } else {
            const auto add_rows = [&](int32_t begin, int32_t end) {
                for (int64_t r = 0; r < count; ++r)
                    add_ragged(weights + r * kBlock, seen.rows[r].clip(begin, end), sums + r * stride_);
            };
            add_rows(0, common.begin);
            if (!common.empty()) add_values(weights, count, common, block.here.values, sums);
            add_rows(common.end, kBlock);
        }
        if (!one_vector()) return;
        for (int64_t r = 0; r < count; ++r, sums += stride_)
            store(out + r * 16, (load(sums) + load(sums + 16)) + (load(sums + 32) + load(sums + 48)));
    }

private:
    bool one_vector() const { return a_->head_dim <= 16; }

    static int32_t whole_packs(int32_t keys) { return keys / Format::kPack * Format::kPack; }

    bool all_finite(Range packs) const { return are_finite(block_->here, packs, width_); }

    // The exponentials of `count` rows as the left side of a product.
    const Left* prepared_weights(const float* exponentials, int64_t count) {
        if constexpr (Format::kTakesFloats) {
            return exponentials;
        } else {
            Format::prepare(exponentials, count * kBlock, weights_);
            return weights_;
        }
    }

    // One row, any range of keys. Of a pack that is seen in part, the rest is taken as 0.
    void add_ragged(const Left* weights, Range keys, float* sums) {
        if (keys.empty()) return;
        if constexpr (Format::kPack == 2) {
            if (keys.begin % 2 != 0) add_half(weights, keys.begin++, sums);
            const Range whole{keys.begin, keys.end / 2 * 2};
            if (!whole.empty()) add_values(weights, 1, whole, block_->here.values, sums);
            if (keys.begin < keys.end && keys.end % 2 != 0) add_half(weights, keys.end - 1, sums);
        } else {
            add_values(weights, 1, keys, block_->here.values, sums);
        }
    }

    // One key of a pair, the other one taken as 0 (its weight is 0, but its value may be anything).
    void add_half(const Left* weights, int32_t key, float* sums) {
        const int64_t offset = key % kGranule / 2 * 2 * width_;
        const Number* pair = block_->here.values[key / kGranule] + offset;
        edge_.resize(kGranule * width_);
        const uint32_t kept = key % 2 == 0 ? 0x0000ffff : 0xffff0000;
        for (int64_t d = 0; d < 2 * width_; d += 2) {
            uint32_t bits;
            std::memcpy(&bits, pair + d, sizeof bits);
            bits &= kept;
            std::memcpy(&edge_[offset + d], &bits, sizeof bits);
        }
        const Number* granules[kGranules];
        granules[key / kGranule] = edge_.data();
        add_values(weights, 1, {key / 2 * 2, key / 2 * 2 + 2}, granules, sums);
    }

    // Whole packs of keys, the same ones for `count` rows.
    void add_values(const Left* weights, int64_t count, Range keys, const Number* const* values, float* sums) const {
        if (one_vector()) return add_to_chains(weights, count, keys, values, sums);
        int64_t d = 0;
        const auto take = [&]<int Most, int Vectors, bool Whole>() {
            with_rows<Most>(count, [&](auto height) {
                add_dimensions<height, Vectors, Whole>(weights, keys, values, d, sums + d);
            });
            d += 16 * Vectors;
        };
        if (count <= kWideTileRows)
            while (a_->head_dim - d >= 64) take.template operator()<kWideTileRows, 4, true>();
        while (a_->head_dim - d >= 32) take.template operator()<kTileRows, 2, true>();
        if (a_->head_dim - d >= 16) take.template operator()<kTileRows, 1, true>();
        if (a_->head_dim > d) take.template operator()<kTileRows, 1, false>();
    }

    // The same where a row has one vector: granules of the four chains side by side where all of them are whole.
    void add_to_chains(const Left* weights, int64_t count, Range keys, const Number* const* values, float* sums) const {
        for (int g = keys.begin / kGranule; g * kGranule < keys.end;) {
            const int32_t begin = g * kGranule;
            if (g % kChains == 0 && keys.begin <= begin && begin + kChains * kGranule <= keys.end) {
                const EvenParts parts(count, kWideTileRows);
                for (int64_t part = 0; part < parts.count; ++part)
                    with_rows<kWideTileRows>(parts.size(part), [&](auto height) {
                        const int64_t row = parts.begin(part);
                        add_side_by_side<height>(weights + row * kBlock, g, values, sums + row * stride_);
                    });
                g += kChains;
            } else {
                with_rows<kTileRows>(count, [&](auto height) {
                    add_dimensions<height, 1, false>(weights, keys.clip(begin, begin + kGranule), values, 0,
                                                     sums + g % kChains * 16);
                });
                ++g;
            }
        }
    }

    template <int Rows>
    __attribute__((noinline)) void add_side_by_side(const Left* weights, int g, const Number* const* values,
                                                    float* memory) const {
        using Product = ValueProduct<Format, false>;
        const auto product = [&](int chain) {
            const int at = g + chain;
            return Product{weights + at * kGranule, values[at], block_->fetched.values[at], width_,
                           static_cast<int>(a_->head_dim)};
        };
        const Product products[kChains] = {product(0), product(1), product(2), product(3)};
        F16 sums[Rows][kChains];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kChains; ++c) sums[r][c] = load(memory + (r * kChains + c) * 16);
        for (int64_t k = 0; k < kGranule / Format::kPack; ++k) {
#pragma GCC unroll 4
            for (int c = 0; c < kChains; ++c) {
                const auto right = products[c].right(k, 0);
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r)
                    sums[r][c] = products[c].multiply_add(products[c].left(r, k), right, sums[r][c]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kChains; ++c) store(memory + (r * kChains + c) * 16, sums[r][c]);
    }

    // Continues the sums [Rows, sums_stride] of dimensions d, d + 1, … over the keys.
    template <int Rows, int Vectors, bool Whole>
    __attribute__((noinline)) void add_dimensions(const Left* weights, Range keys, const Number* const* values,
                                                  int64_t d, float* memory) const {
        F16 sums[Rows][Vectors];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = load(memory + r * stride_ + 16 * v);
        for (int g = keys.begin / kGranule; g * kGranule < keys.end; ++g) {
            const ValueProduct<Format, Whole> product{weights + g * kGranule, values[g] + d * Format::kPack,
                                                      block_->fetched.values[g] + d * Format::kPack, width_,
                                                      static_cast<int>(a_->head_dim - d)};
            const Range packs = keys.clip(g * kGranule, (g + 1) * kGranule).from(g * kGranule);
            if (packs.size() == kGranule)
                accumulate(product, 0, kGranule / Format::kPack, sums);
            else
                accumulate(product, packs.begin / Format::kPack, packs.end / Format::kPack, sums);
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(memory + r * stride_ + 16 * v, sums[r][v]);
    }

    const Arguments* a_ = nullptr;
    const HeadGranules<Number>* block_ = nullptr;
    int64_t stride_ = 0;          // from one row's sums to the next
    int64_t width_ = 0;           // of a token in the cache
    AlignedVector<Number> edge_;  // a granule, one pair of which holds half a pair
    alignas(64) Left weights_[Format::kTakesFloats ? 1 : kTileRows * kBlock];
    alignas(64) float chains_[kTileRows * kChains * 16];
};

}  // namespace
}  // namespace pellucid
