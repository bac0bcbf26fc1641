// Sixteen floats at a time, the same on every CPU.
//
// F16 holds 16 lanes: one AVX-512 register, two AVX2 registers, or an array that the compiler vectorises. Operators are
// written in F16 alone, so AVX-512 and AVX2 give the same bits. (The portable build has no fused multiply-add on
// x86-64; its results are as invariant, but their last bits are its own.)
//
// Rules that hold in every implementation:
//   fma rounds once where the CPU can; nothing else is ever contracted.
//   max(a, b) and min(a, b) give b where either is NaN.
//   horizontal operations use one fixed tree: lanes i and i + 8, then i + 4, i + 2, i + 1.
//   load_pairs reads 32 neighbours: those at even offsets, and those at odd offsets.
//   partial loads read `count` elements and fill the other lanes with 0; partial stores write `count` elements.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PELLUCID_INLINE inline __attribute__((always_inline))

namespace pellucid {
namespace {

PELLUCID_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
PELLUCID_INLINE void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// The upper half of a float.
struct bf16 {
    uint16_t bits;
};

PELLUCID_INLINE float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// IEEE half precision.
struct half {
    uint16_t bits;
};

// To the nearest, ties to even; NaN stays NaN and subnormals stay what they are.
PELLUCID_INLINE bf16 to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded)};
}

// ---- AVX-512 ----------------------------------------------------------------------------------------------------
#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};
struct F16Pair {
    F16 first, second;
};

PELLUCID_INLINE F16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
PELLUCID_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PELLUCID_INLINE F16 load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
PELLUCID_INLINE F16 load(const half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PELLUCID_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }
PELLUCID_INLINE F16 load(const float* p, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
PELLUCID_INLINE F16 load(const bf16* p, int count) {
    const __m256i half = _mm256_maskz_loadu_epi16(first_lanes(count), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
PELLUCID_INLINE F16Pair load_pairs(const bf16* p) {
    const __m512i bits = _mm512_loadu_si512(p);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(bits, upper))}};
}
PELLUCID_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
PELLUCID_INLINE void store(float* p, F16 x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x.v); }
#if defined(__AVX512BF16__)
// As to_bf16, but for subnormal numbers, which become 0: products take them for that.
PELLUCID_INLINE void store(bf16* p, F16 x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
    std::memcpy(p, &rounded, sizeof rounded);
}
PELLUCID_INLINE void store(bf16* p, F16 x, int count) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
#endif

PELLUCID_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PELLUCID_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PELLUCID_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PELLUCID_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PELLUCID_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PELLUCID_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PELLUCID_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y, lane by lane; y where a or b is NaN.
PELLUCID_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
PELLUCID_INLINE F16 shift_left_23(F16 x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), 23))};
}

// Rows of a register tile that is two F16 wide, and of one that is four wide: as many accumulators as registers hold.
constexpr int kTileRows = 14;
constexpr int kWideTileRows = 6;

// ---- AVX2 with FMA ----------------------------------------------------------------------------------------------
#elif defined(__AVX2__)

struct F16 {
    __m256 low, high;
};
struct F16Pair {
    F16 first, second;
};

PELLUCID_INLINE F16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PELLUCID_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PELLUCID_INLINE F16 load(const bf16* p) {
    const auto widen = [](const bf16* half) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    };
    return {widen(p), widen(p + 8)};
}
PELLUCID_INLINE F16 load(const half* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
PELLUCID_INLINE F16Pair load_pairs(const bf16* p) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    const __m256i low = _mm256_loadu_si256(halves), high = _mm256_loadu_si256(halves + 1);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))}};
}
PELLUCID_INLINE void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}

PELLUCID_INLINE F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
PELLUCID_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
PELLUCID_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm256_blendv_ps(y.low, x.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.high, x.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
PELLUCID_INLINE F16 shift_left_23(F16 x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.low), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.high), 23))};
}

constexpr int kTileRows = 3;
constexpr int kWideTileRows = 1;

// ---- any other CPU ----------------------------------------------------------------------------------------------
#else

// Four vectors of the compiler's own type, the width that every SIMD unit has.
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));
typedef uint16_t QuadHalves __attribute__((vector_size(8)));

struct F16 {
    Quad quads[4];
};
struct F16Pair {
    F16 first, second;
};

template <class Body>
PELLUCID_INLINE F16 each_quad(const Body& body) {
    return {body(0), body(1), body(2), body(3)};
}

PELLUCID_INLINE F16 broadcast(float x) {
    return each_quad([=](int) { return Quad{x, x, x, x}; });
}
PELLUCID_INLINE F16 load(const float* p) {
    return each_quad([=](int i) {
        Quad quad;
        std::memcpy(&quad, p + 4 * i, sizeof quad);
        return quad;
    });
}
PELLUCID_INLINE F16 load(const bf16* p) {
    return each_quad([=](int i) {
        QuadHalves halves;
        std::memcpy(&halves, p + 4 * i, sizeof halves);
        return std::bit_cast<Quad>(__builtin_convertvector(halves, QuadBits) << 16);
    });
}
PELLUCID_INLINE F16 load(const half* p) {  // finite ones
    return each_quad([=](int i) {
        QuadHalves halves;
        std::memcpy(&halves, p + 4 * i, sizeof halves);
        const QuadBits bits = __builtin_convertvector(halves, QuadBits);
        const Quad size = std::bit_cast<Quad>((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponents' biases differ
        return std::bit_cast<Quad>(std::bit_cast<QuadBits>(size) | (bits & 0x8000u) << 16);
    });
}
PELLUCID_INLINE F16Pair load_pairs(const bf16* p) {
    const auto bits = [=](int i) {
        QuadBits quad;
        std::memcpy(&quad, p + 8 * i, sizeof quad);
        return quad;
    };
    return {each_quad([=](int i) { return std::bit_cast<Quad>(bits(i) << 16); }),
            each_quad([=](int i) { return std::bit_cast<Quad>(bits(i) & 0xffff0000u); })};
}
PELLUCID_INLINE void store(float* p, F16 x) { std::memcpy(p, x.quads, sizeof x.quads); }

PELLUCID_INLINE F16 operator+(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] + b.quads[i]; });
}
PELLUCID_INLINE F16 operator-(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] - b.quads[i]; });
}
PELLUCID_INLINE F16 operator*(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] * b.quads[i]; });
}
PELLUCID_INLINE F16 operator/(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] / b.quads[i]; });
}
PELLUCID_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return each_quad([=](int i) {
#if defined(__FP_FAST_FMAF)
        Quad quad;
        for (int j = 0; j < 4; ++j) quad[j] = __builtin_fmaf(a.quads[i][j], b.quads[i][j], c.quads[i][j]);
        return quad;
#else
        return a.quads[i] * b.quads[i] + c.quads[i];
#endif
    });
}
PELLUCID_INLINE F16 max(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] > b.quads[i] ? a.quads[i] : b.quads[i]; });
}
PELLUCID_INLINE F16 min(F16 a, F16 b) {
    return each_quad([=](int i) { return a.quads[i] < b.quads[i] ? a.quads[i] : b.quads[i]; });
}
PELLUCID_INLINE F16 select_less(F16 a, F16 b, F16 x, F16 y) {
    return each_quad([=](int i) { return a.quads[i] < b.quads[i] ? x.quads[i] : y.quads[i]; });
}
PELLUCID_INLINE F16 shift_left_23(F16 x) {
    return each_quad([=](int i) { return std::bit_cast<Quad>(std::bit_cast<QuadBits>(x.quads[i]) << 23); });
}

#if defined(__x86_64__)  // 16 registers
constexpr int kTileRows = 1;
#else  // 32 registers
constexpr int kTileRows = 3;
#endif
constexpr int kWideTileRows = 1;

#endif

// ---- the same for all -------------------------------------------------------------------------------------------
#if !defined(__AVX512F__)

template <class T>
PELLUCID_INLINE F16 load(const T* p, int count) {
    if (count == 16) return load(p);
    T padded[16] = {};
    std::memcpy(padded, p, sizeof(T) * count);
    return load(padded);
}
PELLUCID_INLINE void store(float* p, F16 x, int count) {
    if (count == 16) return store(p, x);
    float lanes[16];
    store(lanes, x);
    std::memcpy(p, lanes, sizeof(float) * count);
}

#endif

PELLUCID_INLINE F16 lane_indices() {
    static constexpr float indices[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(indices);
}

// x in lanes [begin, end), `fill` elsewhere: masked lanes are replaced, never computed with.
PELLUCID_INLINE F16 keep_lanes(F16 x, int begin, int end, F16 fill) {
    const F16 lane = lane_indices();
    const F16 from_begin = select_less(lane, broadcast(static_cast<float>(begin)), fill, x);
    return select_less(lane, broadcast(static_cast<float>(end)), from_begin, fill);
}

PELLUCID_INLINE F16 absolute(F16 x) { return max(x, broadcast(0.0f) - x); }

#if defined(__AVX2__)
// One number out of 16 lanes, by the tree above. combine takes __m256 and __m128.
template <class Combine>
PELLUCID_INLINE float reduce(F16 x, const Combine& combine) {
#if defined(__AVX512F__)
    const __m256 eight = combine(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#else
    const __m256 eight = combine(x.low, x.high);
#endif
    const __m128 four = combine(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = combine(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(combine(two, _mm_movehdup_ps(two)));
}
PELLUCID_INLINE float horizontal_sum(F16 x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}
PELLUCID_INLINE float horizontal_max(F16 x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}
#else
PELLUCID_INLINE float horizontal_sum(F16 x) {
    float lanes[16];
    store(lanes, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}
PELLUCID_INLINE float horizontal_max(F16 x) {
    float lanes[16];
    store(lanes, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
#endif

// The same of `count` <= 16 vectors at once: out[i] of rows[i]. One after the other they would wait for every step of theirs.
#if defined(__AVX512F__)
template <class Combine>
PELLUCID_INLINE F16 reduce_rows(const float* rows, const Combine& combine) {
    __m512 x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_ps(rows + 16 * i);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        x[i] = combine(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        x[i] = combine(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(x[i]), b = _mm512_castps_pd(x[i + 2]);
        x[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 mixed = combine(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
    const __m512i places = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(places, mixed)};
}
constexpr int64_t kFewRows = 4;  // take less time one by one
#endif

PELLUCID_INLINE void horizontal_sums(const float* rows, int64_t count, float* out) {
#if defined(__AVX512F__)
    if (count > kFewRows)
        return store(out, reduce_rows(rows, [](__m512 a, __m512 b) { return a + b; }), static_cast<int>(count));
#endif
    for (int64_t i = 0; i < count; ++i) out[i] = horizontal_sum(load(rows + 16 * i));
}
PELLUCID_INLINE void horizontal_maxima(const float* rows, int64_t count, float* out) {
#if defined(__AVX512F__)
    if (count > kFewRows)
        return store(out, reduce_rows(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }), static_cast<int>(count));
#endif
    for (int64_t i = 0; i < count; ++i) out[i] = horizontal_max(load(rows + 16 * i));
}

PELLUCID_INLINE F16 round_to_integer(F16 x) {  // |x| < 2^22
#if defined(__AVX512F__)
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
    const F16 magic = broadcast(0x1.8p23f);
    return (x + magic) - magic;
#endif
}

// x 2^n, rounded once; n whole, in [-252, 254], |x| about 1.
PELLUCID_INLINE F16 times_power_of_two(F16 x, F16 n) {
#if defined(__AVX512F__)
    return {_mm512_scalef_ps(x.v, n.v)};
#else
    const auto power = [](F16 m) { return shift_left_23(m + broadcast(0x1.8p23f + 127.0f)); };  // m in [-126, 127]
    const F16 half = round_to_integer(n * broadcast(0.5f));  // in two steps, so that 2^n may be subnormal or infinite
    return x * power(half) * power(n - half);
#endif
}

// e^x to about one part in ten million; 0 below the smallest subnormal, infinity above the largest float.
// x = n ln 2 + r with |r| <= ln(2)/2, and a polynomial (minimax, fitted for this file) for e^r.
PELLUCID_INLINE F16 exp(F16 x) {
    x = max(broadcast(-105.0f), min(broadcast(89.0f), x));
    const F16 n = round_to_integer(x * broadcast(1.44269504f));
    F16 r = fma(n, broadcast(-0x1.62ep-1f), x);        // ln 2 in two parts: n times the first is exact
    r = fma(n, broadcast(-0x1.0bfbe8p-15f), r);
    F16 p = broadcast(0.00138146104f);
    p = fma(p, r, broadcast(0.00836871006f));
    p = fma(p, r, broadcast(0.041668389f));
    p = fma(p, r, broadcast(0.166665211f));
    p = fma(p, r, broadcast(0.49999994f));
    p = fma(p, r * r, r) + broadcast(1.0f);
    return times_power_of_two(p, n);
}

// 2^x, as exact as exp, for x up to 127; 0 below the smallest subnormal. x = n + r with |r| <= 1/2, and a polynomial
// (minimax, fitted for this file) for 2^r.
PELLUCID_INLINE F16 exp2(F16 x) {
    x = max(broadcast(-152.0f), x);
    const F16 n = round_to_integer(x), r = x - n;
    F16 p = broadcast(0.00132647273f);
    p = fma(p, r, broadcast(0.00967151299f));
    p = fma(p, r, broadcast(0.0555073359f));
    p = fma(p, r, broadcast(0.240222424f));
    p = fma(p, r, broadcast(0.693147004f));
    return times_power_of_two(fma(p, r, broadcast(1.0f)), n);
}

// tanh x: odd polynomial (minimax, fitted for this file) near 0, by exp elsewhere.
PELLUCID_INLINE F16 tanh(F16 x) {
    const F16 size = absolute(x);
    const F16 one = broadcast(1.0f), zero = broadcast(0.0f);
    const F16 far = one - broadcast(2.0f) / (exp(size + size) + one);
    const F16 square = x * x;
    F16 p = broadcast(-0.00571703678f);
    p = fma(p, square, broadcast(0.0206505787f));
    p = fma(p, square, broadcast(-0.0537434965f));
    p = fma(p, square, broadcast(0.133314908f));
    p = fma(p, square, broadcast(-0.333332837f));
    const F16 near = fma(p * square, x, x);
    return select_less(size, broadcast(0.625f), near, select_less(x, zero, zero - far, far));
}

PELLUCID_INLINE F16 keep_first(F16 x, int count) { return keep_lanes(x, 0, count, broadcast(0.0f)); }

// In place of a count: all 16.
struct Whole {};
PELLUCID_INLINE F16 keep_first(F16 x, Whole) { return x; }
template <class T>
PELLUCID_INLINE F16 load(const T* p, Whole) { return load(p); }
template <class T>
PELLUCID_INLINE void store(T* p, F16 x, Whole) {
    store(p, x);
}

}  // namespace
}  // namespace pellucid
