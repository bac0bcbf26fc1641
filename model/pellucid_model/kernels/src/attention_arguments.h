// What paged attention is asked to do, which keys a row sees, and how a head is rotated.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "simd.h"

namespace pellucid {
namespace {

// Of the numbers in the cache; attention_cache.h says how they lie.
enum CacheFormat : int32_t { kFloat32Cache, kBfloat16Cache, kInt8Cache };

// Mirrors native.py. T rows, S sequences, P table positions; null where an option is not used.
struct Arguments {
    const float* q;        // [T, Hq, D]
    const float* k;        // [T, Hkv, D], or null: the cache holds all keys and values already
    const float* v;        // [T, Hkv, D], or null
    void* k_cache;         // [blocks, Hkv, block_size, W], see attention_cache.h
    void* v_cache;         // [blocks, Hkv, block_size, W]
    float* out;            // [T, Hq, D]; or rows of bfloat16
    const int32_t* row_sequence;          // [T]
    const int32_t* positions;             // [T]
    const int32_t* block_tables;          // [S, table_width]
    const int32_t* window;                // [S], 0: none; or null
    const int32_t* sinks;                 // [S] or null
    const int32_t* sink_query_positions;  // [T] or null: as positions
    const float* cos;                     // [P, rotary_dim / 2] or null
    const float* sin;                     // [P, rotary_dim / 2] or null
    const float* alibi_slopes;            // [Hq] or null
    const float* distance_bias;           // [Hq, bias_width] or null
    int64_t q_stride, k_stride, v_stride;  // from one row to the next, in numbers
    int64_t rounded_stride;                // of rows of bfloat16; 0: out is float32
    int64_t rows, query_heads, kv_heads, head_dim;
    int64_t blocks, block_size, block_stride;  // block_stride: from one block to the next, in numbers
    int64_t sequences, table_width;
    int64_t rotary_positions, rotary_dim, bias_width;
    float scale, softcap;  // softcap 0: none
    int32_t interleaved, cache_format, threads;
    // What a team shares, null where there is none: room to merge in (pellucid_count_partials), and what went wrong.
    float* partials;
    std::atomic<int32_t>* status;
};

enum Status : int32_t { kOk, kBadRowSequence, kBadPosition, kBadSinkQueryPosition, kBadBlock };

struct Range {
    int32_t begin, end;
    bool empty() const { return begin >= end; }
    int32_t size() const { return end - begin; }
    bool holds(int32_t i) const { return begin <= i && i < end; }
    Range from(int32_t start) const { return {begin - start, end - start}; }
    Range clip(int32_t from, int32_t to) const { return {std::max(begin, from), std::min(end, to)}; }
};

struct Visible {
    Range sinks, window;
};

inline int32_t sink_query_position(const Arguments& a, int64_t row) {
    return a.sink_query_positions ? a.sink_query_positions[row] : a.positions[row];
}

// Sinks that touch the window and are scored with the same query are ordinary keys: such a row is plain causal
// attention to the last bit.
inline Visible visible_keys(const Arguments& a, int64_t row) {
    const int32_t sequence = a.row_sequence[row], position = a.positions[row];
    const int32_t window = a.window ? a.window[sequence] : 0;
    const int32_t begin = window > 0 ? std::max(0, position - window + 1) : 0;
    const int32_t sinks = a.sinks ? std::clamp(a.sinks[sequence], 0, begin) : 0;
    if (sinks == begin && sink_query_position(a, row) == position) return {{0, 0}, {0, position + 1}};
    return {{0, sinks}, {begin, position + 1}};
}

// A head [head_dim], its first rotary_dim numbers rotated by the angles of `position`: in `out`, or where it lies if
// nothing is rotated.
inline const float* rotated(const Arguments& a, const float* head, int64_t position, float* out) {
    if (!a.cos) return head;
    for (int64_t d = a.rotary_dim; d < a.head_dim; ++d) out[d] = head[d];
    const int64_t pairs = a.rotary_dim / 2;
    const float *cos = a.cos + position * pairs, *sin = a.sin + position * pairs;
    if (a.interleaved) {
        for (int64_t i = 0; i < pairs; ++i) {
            const float x = head[2 * i], y = head[2 * i + 1];
            out[2 * i] = x * cos[i] - y * sin[i];
            out[2 * i + 1] = y * cos[i] + x * sin[i];
        }
        return out;
    }
    for (int64_t i = 0; i < pairs; i += 16) {
        const int count = static_cast<int>(std::min<int64_t>(16, pairs - i));
        const F16 x = load(head + i, count), y = load(head + pairs + i, count);
        const F16 c = load(cos + i, count), s = load(sin + i, count);
        store(out + i, x * c - y * s, count);
        store(out + pairs + i, y * c + x * s, count);
    }
    return out;
}

}  // namespace
}  // namespace pellucid
