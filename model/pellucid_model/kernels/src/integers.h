// Products of unsigned by signed bytes, summed in 32-bit integers: exact, so every CPU gives the same.
//
// I16 holds 16 sums, one for each of 16 columns. A Bytes holds four weights, 0 to 255, of each of those columns; a Four
// four activations, -128 to 127, that meet them all. `Activation` is how activations lie in memory.
//
//   dot(weights, four, sum)   sum + the four products, column by column
//
// With AVX-512's VNNI that is one instruction. Without it bytes are widened to 16 bits and multiplied in pairs; the products of
// even and of odd bytes are added up one after the other, which keeps every sum in its own column.
#pragma once

#include "simd.h"

namespace pellucid {
namespace {

#if defined(__AVX512F__)

using Activation = int8_t;
struct I16 {
    __m512i v;
};
struct Bytes {
    __m512i v;
};
struct Four {
    __m512i v;
};

PELLUCID_INLINE I16 broadcast_integer(int32_t x) { return {_mm512_set1_epi32(x)}; }
PELLUCID_INLINE F16 to_float(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
PELLUCID_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PELLUCID_INLINE void load_nibbles(const uint8_t* p, Bytes& low, Bytes& high) {
    const __m512i bytes = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low = {_mm512_and_si512(bytes, mask)};
    high = {_mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
}
PELLUCID_INLINE Four load_four(const Activation* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
PELLUCID_INLINE I16 dot(Bytes weights, Four four, I16 sum) {
    // The intrinsic, but for GCC 12, which copies the sum to another register and back each time.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(four.v));
    return sum;
}

PELLUCID_INLINE void store_four(Activation* to, const int8_t* four) { std::memcpy(to, four, 4); }

#else

using Activation = int16_t;  // of each four, those at even places come first

PELLUCID_INLINE void store_four(Activation* to, const int8_t* four) {
    const Activation arranged[4] = {four[0], four[2], four[1], four[3]};
    std::memcpy(to, arranged, sizeof arranged);
}

struct Pairs {
    int32_t even, odd;  // two 16-bit numbers each
};
PELLUCID_INLINE Pairs read_pairs(const Activation* p) {
    Pairs pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}

#if defined(__AVX2__)

struct I16 {
    __m256i low, high;
};
struct Bytes {
    __m256i even_low, odd_low, even_high, odd_high;
};
struct Four {
    __m256i even, odd;
};

PELLUCID_INLINE I16 broadcast_integer(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PELLUCID_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
PELLUCID_INLINE Bytes widen(__m256i low, __m256i high) {
    const __m256i mask = _mm256_set1_epi16(255);
    return {_mm256_and_si256(low, mask), _mm256_srli_epi16(low, 8), _mm256_and_si256(high, mask),
            _mm256_srli_epi16(high, 8)};
}
PELLUCID_INLINE __m256i load_half(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PELLUCID_INLINE Bytes load_bytes(const uint8_t* p) { return widen(load_half(p), load_half(p + 32)); }
PELLUCID_INLINE void load_nibbles(const uint8_t* p, Bytes& low, Bytes& high) {
    const __m256i first = load_half(p), second = load_half(p + 32), mask = _mm256_set1_epi8(15);
    const auto upper = [=](__m256i bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask); };
    low = widen(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
    high = widen(upper(first), upper(second));
}
PELLUCID_INLINE Four load_four(const Activation* p) {
    const Pairs pairs = read_pairs(p);
    return {_mm256_set1_epi32(pairs.even), _mm256_set1_epi32(pairs.odd)};
}
PELLUCID_INLINE __m256i dot(__m256i even, __m256i odd, Four four, __m256i sum) {
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(even, four.even)),
                            _mm256_madd_epi16(odd, four.odd));
}
PELLUCID_INLINE I16 dot(Bytes weights, Four four, I16 sum) {
    return {dot(weights.even_low, weights.odd_low, four, sum.low),
            dot(weights.even_high, weights.odd_high, four, sum.high)};
}

#else

typedef int32_t IntegerQuad __attribute__((vector_size(16)));

struct I16 {
    IntegerQuad quads[4];
};
struct Bytes {
    QuadBits quads[4];
};
struct Four {
    int32_t even_first, even_second, odd_first, odd_second;
};

PELLUCID_INLINE I16 broadcast_integer(int32_t x) {
    const IntegerQuad quad = {x, x, x, x};
    return {{quad, quad, quad, quad}};
}
PELLUCID_INLINE F16 to_float(I16 x) {
    return each_quad([=](int i) { return __builtin_convertvector(x.quads[i], Quad); });
}
PELLUCID_INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes bytes;
    std::memcpy(bytes.quads, p, sizeof bytes.quads);
    return bytes;
}
PELLUCID_INLINE void load_nibbles(const uint8_t* p, Bytes& low, Bytes& high) {
    const Bytes bytes = load_bytes(p);
    for (int i = 0; i < 4; ++i) {
        low.quads[i] = bytes.quads[i] & 0x0f0f0f0fu;
        high.quads[i] = (bytes.quads[i] >> 4) & 0x0f0f0f0fu;
    }
}
PELLUCID_INLINE Four load_four(const Activation* p) { return {p[0], p[1], p[2], p[3]}; }
PELLUCID_INLINE I16 dot(Bytes weights, Four four, I16 sum) {
    for (int i = 0; i < 4; ++i) {
        const QuadBits w = weights.quads[i];
        sum.quads[i] += std::bit_cast<IntegerQuad>(w & 255u) * four.even_first;
        sum.quads[i] += std::bit_cast<IntegerQuad>((w >> 16) & 255u) * four.even_second;
        sum.quads[i] += std::bit_cast<IntegerQuad>((w >> 8) & 255u) * four.odd_first;
        sum.quads[i] += std::bit_cast<IntegerQuad>(w >> 24) * four.odd_second;
    }
    return sum;
}

#endif
#endif

// How many rows a register tile of two vectors holds, with an integer and a float sum for each number; one of four.
#if defined(__AVX512F__)
constexpr int kIntegerTileRows = 7, kWideIntegerTileRows = 3;
#else
constexpr int kIntegerTileRows = 2, kWideIntegerTileRows = 1;
#endif

}  // namespace
}  // namespace pellucid
