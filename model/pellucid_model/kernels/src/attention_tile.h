// Attention of one tile: some consecutive rows of a sequence, all query heads of one kv head, over all keys they see.
//
// A row's result has one arithmetic, whatever shares its batch or its tile:
//   - The keys it sees are one or two ranges of positions: sinks the window has left behind, then the window.
//   - Each range is cut at multiples of 64 positions. A piece gives a partial softmax of its own
//     (largest score, sum of exponentials, weighted sum of values), each a chain in ascending key order.
//   - The partials are merged in that order.
// Keys a row does not see are never multiplied by zero; they are skipped, so a NaN there stays there.
#pragma once

#include <atomic>
#include <climits>
#include <vector>

#include "attention_arguments.h"
#include "parallel.h"
#include "tile.h"

namespace pellucid {
namespace {

constexpr int kBlock = 64;  // keys per partial softmax

// Rows first to first + count - 1: consecutive rows of one sequence.
struct TokenTile {
    int64_t first, count;
};

// scores[r][key] = q[r] . key, 16 keys per vector, one chain over the head's dimensions.
struct ScoreProduct {
    const float* q;     // [rows, head_dim]
    int64_t head_dim;
    const float* keys;  // [head_dim, kBlock]

    PELLUCID_INLINE F16 left(int r, int64_t d) const { return broadcast(q[r * head_dim + d]); }
    PELLUCID_INLINE F16 right(int64_t d, int v) const { return load(keys + d * kBlock + 16 * v); }
    PELLUCID_INLINE F16 multiply_add(F16 a, F16 b, F16 sum) const { return fma(a, b, sum); }
};

// sums[r] += weight[r][key] * value[key], 16 dimensions per vector, one chain over the keys.
template <class Element, bool Whole>
struct ValueProduct {
    const float* weights;          // [rows, kBlock]
    const Element* const* values;  // [kBlock]
    int64_t dimension;
    int count;  // dimensions of the only vector, where it is not whole

    PELLUCID_INLINE F16 left(int r, int64_t key) const { return broadcast(weights[r * kBlock + key]); }
    PELLUCID_INLINE F16 right(int64_t key, int v) const {
        if constexpr (Whole) return load(values[key] + dimension + 16 * v);
        return load(values[key] + dimension, count);
    }
    PELLUCID_INLINE F16 multiply_add(F16 a, F16 b, F16 sum) const { return fma(a, b, sum); }
};

// sums [Rows, stride] in memory, loaded, continued and stored.
template <int Rows, int Vectors, class Product>
__attribute__((noinline)) void accumulate_in_memory(const Product& product, int64_t begin, int64_t end, float* memory,
                                                    int64_t stride) {
    F16 sums[Rows][Vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[r][v] = load(memory + r * stride + 16 * v);
    accumulate(product, begin, end, sums);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(memory + r * stride + 16 * v, sums[r][v]);
}

// One tile of rows of one kv head, with the memory it works in. Kept by a thread from unit to unit.
template <class Element>
class TileAttention {
public:
    TileAttention(const Arguments& arguments, std::atomic<int32_t>& status) : a_(arguments), status_(status) {}

    void run(const TokenTile& tile, int64_t kv_head) {
        tile_ = tile;
        kv_head_ = kv_head;
        group_ = a_.query_heads / a_.kv_heads;
        rows_ = tile.count * group_;
        stride_ = (a_.head_dim + 15) / 16 * 16;
        resize();

        bool any_sinks = false;
        for (int64_t t = 0; t < tile.count; ++t) {
            const Visible visible = visible_keys(a_, tile.first + t);
            any_sinks |= !visible.sinks.empty();
            std::fill_n(sinks_.begin() + t * group_, group_, visible.sinks);
            std::fill_n(window_.begin() + t * group_, group_, visible.window);
        }
        if (any_sinks) attend(sinks_, true);
        attend(window_, false);
        write_result();
    }

private:
    void resize() {
        q_.resize(rows_ * a_.head_dim);
        sinks_.resize(rows_);
        window_.resize(rows_);
        local_.resize(rows_);
        keys_.resize(a_.head_dim * kBlock);
        scores_.resize(rows_ * kBlock);
        partial_.resize(rows_ * stride_);
        partial_largest_.resize(rows_);
        partial_sum_.resize(rows_);
        total_.assign(rows_ * stride_, 0.0f);
        largest_.assign(rows_, -INFINITY);
        sum_.assign(rows_, 0.0f);
    }

    // Adds one range of keys of every row to the rows' totals.
    void attend(const std::vector<Range>& ranges, bool to_sinks) {
        rotate_queries(to_sinks);
        int32_t first = INT32_MAX, last = 0;
        for (const Range& range : ranges)
            if (!range.empty()) first = std::min(first, range.begin), last = std::max(last, range.end);
        for (int32_t start = first / kBlock * kBlock; start < last; start += kBlock) {
            Range seen{kBlock, 0};  // by any row, within this block
            for (int64_t r = 0; r < rows_; ++r) {
                const Range in_block = ranges[r].clip(start, start + kBlock);
                local_[r] = in_block.empty() ? Range{0, 0} : Range{in_block.begin - start, in_block.end - start};
                if (!local_[r].empty())
                    seen = {std::min(seen.begin, local_[r].begin), std::max(seen.end, local_[r].end)};
            }
            if (!seen.empty() && find_keys(start, seen)) attend_block(start, seen, to_sinks);
        }
    }

    void rotate_queries(bool to_sinks) {
        for (int64_t t = 0; t < tile_.count; ++t) {
            const int64_t row = tile_.first + t;
            const int64_t position = to_sinks ? sink_query_position(a_, row) : a_.positions[row];
            for (int64_t g = 0; g < group_; ++g)
                rotate(a_, a_.q + row * a_.q_stride + (kv_head_ * group_ + g) * a_.head_dim, position,
                       &q_[(t * group_ + g) * a_.head_dim]);
        }
    }

    // Where the keys and values of the block lie. False, with the status set, if the table does not hold one of them.
    bool find_keys(int32_t start, Range seen) {
        const int32_t* table = a_.block_tables + a_.row_sequence[tile_.first] * a_.table_width;
        for (int32_t key = seen.begin; key < seen.end;) {
            const int64_t position = start + key, offset = position % a_.block_size;
            const int32_t block = table[position / a_.block_size];
            if (block < 0 || block >= a_.blocks) {
                status_ = kBadBlock;
                return false;
            }
            int64_t slot = ((block * a_.kv_heads + kv_head_) * a_.block_size + offset) * a_.head_dim;
            const int64_t end = std::min<int64_t>(seen.end, key + a_.block_size - offset);
            for (; key < end; ++key, slot += a_.head_dim) {
                key_[key] = static_cast<const Element*>(a_.k_cache) + slot;
                value_[key] = static_cast<const Element*>(a_.v_cache) + slot;
            }
        }
        return true;
    }

    void attend_block(int32_t start, Range seen, bool to_sinks) {
        const int first = seen.begin / 16, last = (seen.end + 15) / 16;  // vectors of 16 keys
        for (int vector = first; vector < last; ++vector) transpose_keys(vector, seen);
        std::fill(scores_.begin(), scores_.end(), 0.0f);
        std::fill(partial_.begin(), partial_.end(), 0.0f);
        const EvenParts parts(rows_, kTileRows);
        for (int64_t part = 0; part < parts.count; ++part) {
            const int64_t row = parts.begin(part), count = parts.size(part);
            score(row, count, first, last);
            for (int64_t r = row; r < row + count; ++r)
                if (!local_[r].empty()) softmax(r, start, first, last, to_sinks);
            sum_values(row, count);
        }
        for (int64_t r = 0; r < rows_; ++r)
            if (!local_[r].empty()) merge(r);
    }

    // keys_[d][key] for 16 keys; keys that nobody sees are not read and count as 0 until they are masked.
    void transpose_keys(int vector, Range seen) {
        for (int64_t d = 0; d < a_.head_dim; d += 16) {
            const int count = static_cast<int>(std::min<int64_t>(16, a_.head_dim - d));
            F16 block[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                const int key = 16 * vector + i;
                const bool read = seen.begin <= key && key < seen.end;
                block[i] = read ? load(key_[key] + d, count) : broadcast(0.0f);
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i)
                if (i < count) store(&keys_[(d + i) * kBlock + 16 * vector], block[i]);
        }
    }

    void score(int64_t row, int64_t count, int first, int last) {
        const auto take = [&]<int Most, int Vectors>() {
            with_rows<Most>(count, [&](auto height) {
                const ScoreProduct product{&q_[row * a_.head_dim], a_.head_dim, &keys_[16 * first]};
                accumulate_in_memory<height, Vectors>(product, 0, a_.head_dim, &scores_[row * kBlock + 16 * first],
                                                      kBlock);
            });
            first += Vectors;
        };
        if (count <= kWideTileRows && last - first == 4) take.template operator()<kWideTileRows, 4>();
        while (last - first >= 2) take.template operator()<kTileRows, 2>();
        if (last > first) take.template operator()<kTileRows, 1>();
    }

    // What a head adds for 16 keys that stand `distance`, distance - 1, … behind the query; the table's last column
    // counts for all that is farther. Keys in front of the query are masked afterwards.
    F16 bias_by_distance(int64_t head, int64_t distance) const {
        const float* table = a_.distance_bias + head * a_.bias_width;
        float bias[16];
        for (int i = 0; i < 16; ++i) bias[i] = table[std::clamp<int64_t>(distance - i, 0, a_.bias_width - 1)];
        return load(bias);
    }

    // Turns the scores of a row into exponentials relative to their largest; what it does not see becomes 0.
    void softmax(int64_t r, int32_t start, int first, int last, bool to_sinks) {
        const int64_t row = tile_.first + r / group_, head = kv_head_ * group_ + r % group_;
        const int64_t query = to_sinks ? sink_query_position(a_, row) : a_.positions[row];
        const F16 unseen = broadcast(-INFINITY);
        float* scores = &scores_[r * kBlock];
        F16 largest = unseen;
        for (int v = first; v < last; ++v) {
            F16 s = load(scores + 16 * v) * broadcast(a_.scale);
            if (a_.softcap > 0) s = broadcast(a_.softcap) * tanh(s / broadcast(a_.softcap));
            if (a_.alibi_slopes) {
                const F16 key = lane_indices() + broadcast(static_cast<float>(start + 16 * v));
                const F16 distance = broadcast(static_cast<float>(query)) - key;
                s = fma(broadcast(-a_.alibi_slopes[head]), distance, s);
            }
            if (a_.distance_bias) s = s + bias_by_distance(head, query - start - 16 * v);
            s = keep_lanes(s, local_[r].begin - 16 * v, local_[r].end - 16 * v, unseen);
            store(scores + 16 * v, s);
            largest = max(largest, s);
        }
        partial_largest_[r] = horizontal_max(largest);
        F16 sum = broadcast(0.0f);
        for (int v = first; v < last; ++v) {
            const F16 e = exp(load(scores + 16 * v) - broadcast(partial_largest_[r]));
            store(scores + 16 * v, e);
            sum = sum + e;
        }
        partial_sum_[r] = horizontal_sum(sum);
    }

    // partial_[r] = sum of weight * value over the keys that r sees. Keys that all rows see go through one tile; the
    // ragged ends before and after them row by row, so that the chain of each row stays in key order.
    void sum_values(int64_t row, int64_t count) {
        Range common{0, kBlock};
        for (int64_t r = row; r < row + count; ++r) common = common.clip(local_[r].begin, local_[r].end);
        if (common.empty()) {
            for (int64_t r = row; r < row + count; ++r) add_values(r, 1, local_[r]);
            return;
        }
        for (int64_t r = row; r < row + count; ++r) add_values(r, 1, {local_[r].begin, common.begin});
        add_values(row, count, common);
        for (int64_t r = row; r < row + count; ++r) add_values(r, 1, {common.end, local_[r].end});
    }

    void add_values(int64_t row, int64_t count, Range keys) {
        if (keys.empty()) return;
        int64_t d = 0;
        const auto take = [&]<int Most, int Vectors, bool Whole>() {
            with_rows<Most>(count, [&](auto height) {
                const int rest = static_cast<int>(a_.head_dim - d);
                const ValueProduct<Element, Whole> product{&scores_[row * kBlock], value_, d, rest};
                accumulate_in_memory<height, Vectors>(product, keys.begin, keys.end, &partial_[row * stride_ + d],
                                                      stride_);
            });
            d += 16 * Vectors;
        };
        if (count <= kWideTileRows)
            while (a_.head_dim - d >= 64) take.template operator()<kWideTileRows, 4, true>();
        while (a_.head_dim - d >= 32) take.template operator()<kTileRows, 2, true>();
        if (a_.head_dim - d >= 16) take.template operator()<kTileRows, 1, true>();
        if (a_.head_dim > d) take.template operator()<kTileRows, 1, false>();
    }

    void merge(int64_t r) {
        const float largest = std::max(partial_largest_[r], largest_[r]);
        const float exponents[2] = {largest_[r] - largest, partial_largest_[r] - largest};
        float factors[16];
        store(factors, exp(load(exponents, 2)));
        sum_[r] = sum_[r] * factors[0] + partial_sum_[r] * factors[1];
        largest_[r] = largest;
        for (int64_t d = r * stride_; d < (r + 1) * stride_; d += 16)
            store(&total_[d], load(&total_[d]) * broadcast(factors[0]) + load(&partial_[d]) * broadcast(factors[1]));
    }

    void write_result() {
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t row = tile_.first + r / group_, head = kv_head_ * group_ + r % group_;
            float* out = a_.out + (row * a_.query_heads + head) * a_.head_dim;
            for (int64_t d = 0; d < a_.head_dim; d += 16)
                store(out + d, load(&total_[r * stride_ + d]) / broadcast(sum_[r]),
                      static_cast<int>(std::min<int64_t>(16, a_.head_dim - d)));
        }
    }

    const Arguments& a_;
    std::atomic<int32_t>& status_;
    TokenTile tile_{};
    int64_t kv_head_ = 0, group_ = 0;
    int64_t rows_ = 0;    // (token, query head) pairs, the heads of a token side by side
    int64_t stride_ = 0;  // head_dim, in whole vectors
    std::vector<float> q_;                                       // [rows, head_dim], rotated
    std::vector<Range> sinks_, window_, local_;                  // [rows]; local_: in this block, from its start
    const Element *key_[kBlock], *value_[kBlock];                // where they lie in the cache
    std::vector<float> keys_;                                    // [head_dim, kBlock]
    std::vector<float> scores_;                                  // [rows, kBlock]
    std::vector<float> partial_, partial_largest_, partial_sum_;  // of this block
    std::vector<float> total_, largest_, sum_;                   // of all blocks so far
};

}  // namespace
}  // namespace pellucid
