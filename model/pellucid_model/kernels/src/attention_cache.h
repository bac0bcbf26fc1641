// How the cache holds the keys and values of one kv head in one block.
//
// They lie in granules of g = min(16, block_size) tokens, one granule after the other:
//
//   float32   keys [D][g]       values [g][D]
//   bfloat16  keys [D / 2][g][2]  values [g / 2][D][2], [D] where g = 1       D padded to whole pairs
//   int8      keys [D / 4][g][4], then scales float32 [g]                     D padded to whole fours
//             values [g / p][D][p], p = min(4, g), then scales float32 [g]
//
// Both products of attention then read whole vectors as they lie: 16 tokens of a dimension (or pair or four of them),
// and 16 dimensions of a token (or pair or four). Mirrored by cache_layout.py.
//
// int8 is x = scale (q - 128), q from 1 to 255, with a scale for each token and kv head, its largest |x| / 127: a
// token's bits depend on that token alone. Where a number of its key or value is not finite, both scales are NaN.
#pragma once

#include "aligned_vector.h"
#include "attention_arguments.h"
#include "linear_formats.h"
#include "scale.h"

namespace pellucid {
namespace {

constexpr int kGranule = 16;

struct Int8Cache {
    using Number = uint8_t;
    static constexpr int kPack = 4;
    static constexpr Number kZero = 128;
};

template <class Format>
struct HeadLayout {
    using Number = typename Format::Number;
    static constexpr int kScale = std::is_same_v<Format, Int8Cache> ? sizeof(float) : 0;  // numbers that it takes
    int64_t width, stride, granule;  // numbers per token, without and with its scale; tokens per granule

    HeadLayout(int64_t head_dim, int64_t block_size)
        : width(divide_up(head_dim, Format::kPack) * Format::kPack),
          stride(width + kScale),
          granule(std::min<int64_t>(kGranule, block_size)) {}

    bool operator==(const HeadLayout&) const = default;

    // Numbers of token `slot` of a head, and of dimension d of a token, from the beginning of the head or token.
    int64_t key_token(int64_t slot) const { return granule_of(slot) + slot % granule * Format::kPack; }
    int64_t key_dimension(int64_t d) const { return d / Format::kPack * granule * Format::kPack + d % Format::kPack; }
    int64_t value_token(int64_t slot) const {
        return granule_of(slot) + slot % granule / value_pack() * value_pack() * width + slot % value_pack();
    }
    int64_t value_dimension(int64_t d) const { return d * value_pack(); }
    int64_t value_pack() const { return std::min<int64_t>(Format::kPack, granule); }
    int64_t scale(int64_t slot) const { return granule_of(slot) + granule * width + slot % granule * kScale; }
    int64_t granule_of(int64_t slot) const { return slot / granule * granule * stride; }

    // Where head `kv_head` of `block` begins.
    int64_t head(const Arguments& a, int64_t block, int64_t kv_head) const {
        return block * a.block_stride + kv_head * a.block_size * stride;
    }
};

template <class Format>
constexpr typename Format::Number zero() {
    if constexpr (std::is_same_v<Format, Int8Cache>) return Int8Cache::kZero;
    return {};
}

inline bool is_finite(const float* x, int64_t count) { return largest_bits(x, count) < kInfinityBits; }
inline bool is_finite(const bf16* x, int64_t count) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fff);
    return largest < kInfinityBits >> 16;
}

// Stores numbers as a format does, and gives what they are to be multiplied by: its scale, where it has one.
inline float store_rounded(const float* x, int64_t count, float* to) {
    std::copy_n(x, count, to);
    return 1.0f;
}
inline float store_rounded(const float* x, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(x[i]);
    return 1.0f;
}
inline float store_rounded(const float* x, int64_t count, uint8_t* to) {
    const Scale scale(x, count, 127.0f);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(Int8Cache::kZero + scale.round(x[i]));
    return scale.scale;
}

// Writes the keys and values of rows into the cache. Kept by a thread from call to call.
template <class Format>
class CacheWriter {
    using Number = typename Format::Number;

public:
    void start(const Arguments& a) {
        const HeadLayout<Format> layout(a.head_dim, a.block_size);
        if (layout == layout_ && a.head_dim == head_dim_) return;
        layout_ = layout;
        head_dim_ = a.head_dim;
        rotated_.resize(head_dim_);
        key_.assign(layout_.width, zero<Format>());
        value_ = key_;
    }

    // Of row `row`, for kv heads [begin, end), into slot `position % block_size` of cache block `block`.
    void write(const Arguments& a, int64_t row, int64_t block, int64_t begin, int64_t end) {
        const int64_t position = a.positions[row], slot = position % a.block_size;
        for (int64_t head = begin; head < end; ++head) {
            const int64_t to = layout_.head(a, block, head);
            const float* key = a.k + row * a.k_stride + head * head_dim_;
            const float* value = a.v + row * a.v_stride + head * head_dim_;
            store(rotated(a, key, position, rotated_.data()), value, slot, static_cast<Number*>(a.k_cache) + to,
                  static_cast<Number*>(a.v_cache) + to);
        }
    }

private:
    // key, value [head_dim], into slot `slot`.
    void store(const float* key, const float* value, int64_t slot, Number* keys, Number* values) {
        Number *own_keys = keys + layout_.key_token(slot), *own_values = values + layout_.value_token(slot);
        if constexpr (std::is_same_v<Number, float>) {
            scatter(key, value, own_keys, own_values);
        } else {
            const float key_scale = store_rounded(key, head_dim_, key_.data());
            const float value_scale = store_rounded(value, head_dim_, value_.data());
            scatter(key_.data(), value_.data(), own_keys, own_values);
            if constexpr (HeadLayout<Format>::kScale > 0) {
                const bool finite = std::isfinite(key_scale) && std::isfinite(value_scale);
                const float scales[2] = {finite ? key_scale : NAN, finite ? value_scale : NAN};
                std::memcpy(keys + layout_.scale(slot), &scales[0], sizeof(float));
                std::memcpy(values + layout_.scale(slot), &scales[1], sizeof(float));
            }
        }
    }

    // key, value [width]
    void scatter(const Number* key, const Number* value, Number* keys, Number* values) const {
        constexpr int pack = Format::kPack;
        const int64_t width = layout_.width, key_step = layout_.granule, value_step = layout_.value_pack();
        for (int64_t d = 0; d < width; d += pack) std::memcpy(keys + d * key_step, key + d, pack * sizeof *keys);
        for (int64_t d = 0; d < width; ++d) values[d * value_step] = value[d];
    }

    HeadLayout<Format> layout_{1, 1};
    int64_t head_dim_ = 0;
    AlignedVector<float> rotated_;
    AlignedVector<Number> key_, value_;  // rounded; what they have beyond head_dim is 0
};

// Copies token `slot` of a head into a whole granule.
template <class Format>
void copy_token(const HeadLayout<Format>& from, int64_t slot, const typename Format::Number* keys,
                const typename Format::Number* values, const HeadLayout<Format>& to, int64_t place,
                typename Format::Number* to_keys, typename Format::Number* to_values) {
    std::copy_n(keys + from.scale(slot), from.kScale, to_keys + to.scale(place));
    std::copy_n(values + from.scale(slot), from.kScale, to_values + to.scale(place));
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
