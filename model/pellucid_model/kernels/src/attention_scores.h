// The first product of attention: queries times keys, over a block of keys.
#pragma once

#include "aligned_vector.h"
#include "attention_granules.h"
#include "parallel.h"
#include "tile.h"

namespace pellucid {
namespace {

// scores[r][key] = q[r] . key: 16 keys, a granule, per vector; one chain over the head's dimensions.
template <class Format>
struct ScoreProduct {
    using Number = typename Format::Number;
    const typename Format::Left* q;  // [rows, width]
    int64_t width;
    const Number* const* keys;   // granules
    const Number* const* ahead;  // what is needed next, of the same size

    PELLUCID_INLINE auto left(int r, int64_t k) const { return Format::left_pack(q + r * width + k * Format::kPack); }
    PELLUCID_INLINE auto right(int64_t k, int v) const {
        const int64_t offset = k * kGranule * Format::kPack;
        prefetch(ahead[v] + offset);
        return Format::right_packs(keys[v] + offset);
    }
    template <class Pack>
    PELLUCID_INLINE F16 multiply_add(Pack a, Pack b, F16 sum) const {
        return Format::multiply_add(a, b, sum);
    }
};

// The scores of a tile's rows, and their queries.
template <class Format>
class Scores {
    using Left = typename Format::Left;

public:
    static constexpr int kRows = kTileRows;      // that one run takes at the most
    static constexpr int kFetchingRows = kRows;  // so many prefetch what comes next
    static constexpr int kMemoryRows = kRows;    // of the memory for the scores of so many rows

    // Forgets all queries and makes room for those of `rows` rows.
    void start(const Arguments& arguments, int64_t rows) {
        head_dim_ = arguments.head_dim;
        width_ = HeadLayout<Format>(arguments.head_dim, arguments.block_size).width;
        q_.resize(rows * width_);
    }

    // query [head_dim], rotated.
    void set_query(int64_t r, const float* query) { Format::prepare(query, head_dim_, &q_[r * width_]); }

    // scores [count, kBlock] of rows `row` to row + count - 1, for the granules first to last - 1 of a key block.
    void run(int64_t row, int64_t count, const HeadGranules<typename Format::Number>& block, int first, int last,
             float* scores) const {
        const auto take = [&]<int Most, int Vectors>() {
            with_rows<Most>(count, [&](auto height) {
                const ScoreProduct<Format> product{&q_[row * width_], width_, block.here.keys + first,
                                                   block.fetched.keys + first};
                score_granules<height, Vectors>(product, scores + kGranule * first);
            });
            first += Vectors;
        };
        if (count <= kWideTileRows)
            while (last - first >= 4) take.template operator()<kWideTileRows, 4>();
        while (last - first >= 2) take.template operator()<kTileRows, 2>();
        if (last > first) take.template operator()<kTileRows, 1>();
    }

private:
    template <int Rows, int Vectors>
    __attribute__((noinline)) void score_granules(const ScoreProduct<Format>& product, float* scores) const {
        F16 sums[Rows][Vectors];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = broadcast(0.0f);
        const ScoreProduct<Format> own = product;
        accumulate(own, 0, width_ / Format::kPack, sums);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(scores + r * kBlock + 16 * v, sums[r][v]);
    }

    int64_t head_dim_ = 0;
    int64_t width_ = 0;    // of a head in the cache and in q_
    AlignedVector<Left> q_;  // [rows, width]
};

}  // namespace
}  // namespace pellucid
