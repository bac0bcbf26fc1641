// How numbers become whole ones: activations, queries, and what an int8 cache holds.
#pragma once

#include <algorithm>

#include "simd.h"

namespace pellucid {
namespace {

// Bits of the largest absolute value. As integers absolute values are in the same order, and NaN is above all.
PELLUCID_INLINE uint32_t largest_bits(const float* x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffff);
    return largest;
}

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr float kLeast = 0x1p-100f;  // what is smaller counts as 0, so that no factor overflows

constexpr float kMostWhole = 127 * 128;  // of whole numbers of two digits, 128 high + low

// Of numbers that become whole ones up to `most`. Where one is not finite the scale is NaN, and so will be all that is
// computed with it.
struct Scale {
    float scale;    // makes them numbers again
    float inverse;  // makes them whole
    bool any;       // otherwise all become 0

    PELLUCID_INLINE Scale(const float* x, int64_t count, float most) {
        const uint32_t bits = largest_bits(x, count);
        const float largest = std::bit_cast<float>(bits);
        const bool finite = bits < kInfinityBits;
        any = finite && largest >= kLeast;
        inverse = any ? most / largest : 0.0f;
        scale = any ? largest / most : finite ? 0.0f : NAN;
    }

    PELLUCID_INLINE int32_t round(float x) const {
        const float value = any ? x * inverse : 0.0f;
        return static_cast<int32_t>((value + 0x1.8p23f) - 0x1.8p23f);
    }
};

}  // namespace
}  // namespace pellucid
