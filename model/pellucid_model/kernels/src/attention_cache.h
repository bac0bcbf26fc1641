// How the cache holds the keys and values of one kv head in one block.
//
// They lie in granules of g = min(16, block_size) tokens, one granule after the other, W numbers per token:
//
//   float32   keys [W][g]       values [g][W]                             W = head_dim
//   bfloat16  keys [W / 2][g][2]  values [g / 2][W][2], [W] where g = 1   W = head_dim, rounded up to even
//
// Both products of attention then read whole vectors as they lie: 16 tokens of a dimension (or pair of dimensions), and
// 16 dimensions of a token (or pair of tokens). Mirrored by cache_layout.py.
#pragma once

#include "attention_arguments.h"
#include "linear_formats.h"

namespace pellucid {
namespace {

constexpr int kGranule = 16;

template <class Format>
struct HeadLayout {
    using Number = typename Format::Number;
    int64_t width, granule;

    HeadLayout(int64_t head_dim, int64_t block_size)
        : width(divide_up(head_dim, Format::kPack) * Format::kPack),
          granule(std::min<int64_t>(kGranule, block_size)) {}

    // Numbers of token `slot` of a head, and of dimension d of a token, from the beginning of the head or token.
    int64_t key_token(int64_t slot) const {
        return slot / granule * granule * width + slot % granule * Format::kPack;
    }
    int64_t key_dimension(int64_t d) const { return d / Format::kPack * granule * Format::kPack + d % Format::kPack; }
    int64_t value_token(int64_t slot) const { return slot / value_pack() * value_pack() * width + slot % value_pack(); }
    int64_t value_dimension(int64_t d) const { return d * value_pack(); }
    int64_t value_pack() const { return std::min<int64_t>(Format::kPack, granule); }

    // Where head `kv_head` of `block` begins.
    int64_t head(const Arguments& a, int64_t block, int64_t kv_head) const {
        return (block * a.kv_heads + kv_head) * a.block_size * width;
    }
};

inline void store_rounded(const float* x, int64_t count, float* to) { std::copy_n(x, count, to); }
inline void store_rounded(const float* x, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(x[i]);
}

// Writes a token's key and value, [width] each, into slot `slot` of a head.
template <class Format>
void store_token(const HeadLayout<Format>& layout, const typename Format::Number* key,
                 const typename Format::Number* value, int64_t slot, typename Format::Number* keys,
                 typename Format::Number* values) {
    constexpr int pack = Format::kPack;
    keys += layout.key_token(slot);
    values += layout.value_token(slot);
    const int64_t key_step = layout.granule * pack, value_step = layout.value_pack();
    for (int64_t d = 0; d < layout.width; d += pack, keys += key_step) std::memcpy(keys, key + d, pack * sizeof *key);
    for (int64_t d = 0; d < layout.width; ++d, values += value_step) *values = value[d];
}

// Copies token `slot` of a head into a whole granule.
template <class Format>
void copy_token(const HeadLayout<Format>& from, int64_t slot, const typename Format::Number* keys,
                const typename Format::Number* values, const HeadLayout<Format>& to, int64_t place,
                typename Format::Number* to_keys, typename Format::Number* to_values) {
    keys += from.key_token(slot);
    values += from.value_token(slot);
    to_keys += to.key_token(place);
    to_values += to.value_token(place);
    for (int64_t d = 0; d < from.width; ++d) {
        to_keys[to.key_dimension(d)] = keys[from.key_dimension(d)];
        to_values[to.value_dimension(d)] = values[from.value_dimension(d)];
    }
}

}  // namespace
}  // namespace pellucid
