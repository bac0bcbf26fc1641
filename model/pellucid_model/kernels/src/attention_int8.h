// Both products of attention where the cache is int8: whole numbers, summed exactly.
//
// The other side of a product, a query or a block's exponentials times the scales of their values, becomes whole
// numbers of 15 bits with a scale: |w| <= 127 * 128, w = 128 high + low. With AVX-512 the two bytes are multiplied
// apart, which takes the place of one bfloat16 product; elsewhere numbers are widened to 16 bits anyway, and w stays
// whole. Either way a sum is exact, of up to 1024 products, and the same on every CPU.
//
// What is stored is q = x / scale + 128, so sums begin at -128 times the sum of w.
#pragma once

#include "aligned_vector.h"
#include "attention_scores.h"
#include "attention_values.h"
#include "integers.h"

namespace pellucid {
namespace {

#if defined(__AVX512F__)
constexpr int kParts = 2;  // rows of bytes that make a row of whole numbers: high, low
#else
constexpr int kParts = 1;
#endif
constexpr int kInt8Rows = std::max(1, kTileRows / kParts), kWideInt8Rows = kWideTileRows / kParts;

// Writes whole numbers: row `row` lies in rows kParts * row and the next one of [.., width] activations.
class WholeRow {
public:
    WholeRow(Activation* memory, int64_t row, int64_t width) : to_(memory + kParts * row * width), width_(width) {}

#if defined(__AVX512F__)
    // 16 numbers, rounded, to place `at`. Each four of them meet a vector of the cache.
    void put(int64_t at, F16 x) {
        const __m512i whole = _mm512_cvtps_epi32(x.v);
        store(at, _mm512_srai_epi32(whole, 7));
        store(width_ + at, _mm512_and_si512(whole, _mm512_set1_epi32(127)));
        sum_ = _mm512_add_epi32(sum_, whole);
    }

    // What a sum of products with this row begins at.
    int32_t correction() const { return -128 * _mm512_reduce_add_epi32(sum_); }

private:
    void store(int64_t at, __m512i bytes) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to_ + at), _mm512_cvtepi32_epi8(bytes));
    }

    __m512i sum_ = _mm512_setzero_si512();
#else
    void put(int64_t at, F16 x) {
        constexpr int order[4] = {0, 2, 1, 3};  // see integers.h
        float whole[16];
        store(whole, round_to_integer(x));
        for (int i = 0; i < 16; ++i) {
            const auto number = static_cast<int32_t>(whole[i / 4 * 4 + order[i % 4]]);
            to_[at + i] = static_cast<Activation>(number);
            sum_ += number;
        }
    }

    int32_t correction() const { return -128 * sum_; }

private:
    int32_t sum_ = 0;
#endif
    Activation* to_;
    int64_t width_;
};

// Products of kParts * n rows of activations with bytes of the cache.
struct Int8Product {
    const Activation* activations;
    int64_t row_width;
    const uint8_t *bytes[4], *ahead[4];  // of each vector
    int64_t step;                        // bytes from one four to the next

    PELLUCID_INLINE Four left(int r, int64_t k) const { return load_four(activations + r * row_width + 4 * k); }
    PELLUCID_INLINE Bytes right(int64_t k, int v) const {
        prefetch_to_l2(ahead[v] + k * step);
        return load_bytes(bytes[v] + k * step);
    }
    PELLUCID_INLINE I16 multiply_add(Four a, Bytes b, I16 sum) const { return dot(b, a, sum); }
};

// Rows of whole numbers are summed in parts, the last of which begins at the correction.
template <int Rows, int Vectors>
PELLUCID_INLINE void begin(I16 (&sums)[Rows][Vectors], const int32_t* corrections) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v)
            sums[r][v] = broadcast_integer((r + 1) % kParts == 0 ? corrections[r / kParts] : 0);
}

template <int Rows, int Vectors>
PELLUCID_INLINE F16 whole_sum(const I16 (&sums)[Rows][Vectors], int row, int v) {
#if defined(__AVX512F__)
    return to_float({_mm512_add_epi32(_mm512_slli_epi32(sums[2 * row][v].v, 7), sums[2 * row + 1][v].v)});
#else
    return to_float(sums[row][v]);
#endif
}

template <>
class Scores<Int8Cache> {
public:
    static constexpr int kRows = kInt8Rows, kFetchingRows = kRows, kMemoryRows = kRows;

    void start(const Arguments& arguments, int64_t rows) {
        head_dim_ = arguments.head_dim;
        width_ = HeadLayout<Int8Cache>(arguments.head_dim, arguments.block_size).width;
        row_width_ = divide_up(head_dim_, 16) * 16;
        parts_.resize(kParts * rows * row_width_);
        corrections_.resize(rows);
        scales_.resize(rows);
    }

    void set_query(int64_t r, const float* query) {
        const Scale scale(query, head_dim_, kMostWhole);
        scales_[r] = scale.scale;
        WholeRow row(parts_.data(), r, row_width_);
        for (int64_t d = 0; d < head_dim_; d += 16) {
            const F16 x = load(query + d, static_cast<int>(std::min<int64_t>(16, head_dim_ - d)));
            row.put(d, scale.any ? x * broadcast(scale.inverse) : broadcast(0.0f));
        }
        corrections_[r] = row.correction();
    }

    void run(int64_t row, int64_t count, const HeadGranules<uint8_t>& block, int first, int last,
             float* scores) const {
        const auto take = [&]<int Most, int Vectors>() {
            with_rows<Most>(count, [&](auto height) { score_granules<height, Vectors>(row, block, first, scores); });
            first += Vectors;
        };
        if constexpr (kWideInt8Rows > 0)
            if (count <= kWideInt8Rows)
                while (last - first >= 4) take.template operator()<kWideInt8Rows, 4>();
        while (last - first >= 2) take.template operator()<kInt8Rows, 2>();
        if (last > first) take.template operator()<kInt8Rows, 1>();
    }

private:
    template <int Rows, int Vectors>
    __attribute__((noinline)) void score_granules(int64_t row, const HeadGranules<uint8_t>& block, int first,
                                                  float* scores) const {
        Int8Product product{&parts_[kParts * row * row_width_], row_width_, {}, {}, 4 * kGranule};
        F16 scales[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            product.bytes[v] = block.here.keys[first + v];
            product.ahead[v] = block.fetched.keys[first + v];
            prefetch_to_l2(product.ahead[v] + kGranule * width_);
            scales[v] = load(reinterpret_cast<const float*>(product.bytes[v] + kGranule * width_));
        }
        I16 sums[kParts * Rows][Vectors];
        begin(sums, &corrections_[row]);
        accumulate(product, 0, width_ / 4, sums);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const F16 scale = broadcast(scales_[row + r]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v)
                store(scores + r * kBlock + 16 * (first + v), whole_sum(sums, r, v) * scale * scales[v]);
        }
    }

    int64_t head_dim_ = 0, width_ = 0, row_width_ = 0;  // of a query, of a token in the cache, of a row of parts_
    AlignedVector<Activation> parts_;     // [rows, kParts, row_width]
    AlignedVector<int32_t> corrections_;  // [rows]
    AlignedVector<float> scales_;         // [rows]
};

template <>
class ValueSum<Int8Cache> {
public:
    // As for other formats. What a row does not see has the weight 0.
    void run(const Arguments& arguments, const HeadGranules<uint8_t>& block, const float* exponentials,
             const SeenKeys& seen, int64_t count, float* out) {
        block_ = &block;
        stride_ = divide_up(arguments.head_dim, 16) * 16;
        width_ = HeadLayout<Int8Cache>(arguments.head_dim, arguments.block_size).width;
        granules_ = {kGranules, 0};
        for (int64_t r = 0; r < count; ++r) {
            const Range own = granules_of(seen.rows[r]);
            if (!own.empty()) granules_ = {std::min(granules_.begin, own.begin), std::max(granules_.end, own.end)};
        }
        for (int64_t r = 0; r < count; ++r) prepare(exponentials + r * kBlock, seen.rows[r], r);
        int64_t d = 0;
        const auto take = [&]<int Most, int Vectors>() {
            with_rows<Most>(count, [&](auto height) { add_dimensions<height, Vectors>(d, out + d); });
            d += 16 * Vectors;
        };
        if constexpr (kWideInt8Rows > 0)
            if (count <= kWideInt8Rows)
                while (stride_ - d >= 64) take.template operator()<kWideInt8Rows, 4>();
        while (stride_ - d >= 32) take.template operator()<kInt8Rows, 2>();
        if (stride_ > d) take.template operator()<kInt8Rows, 1>();
    }

private:
    static Range granules_of(Range keys) {
        return keys.empty() ? Range{0, 0} : Range{keys.begin / kGranule, (keys.end - 1) / kGranule + 1};
    }

    // The weights of row r as whole numbers: exponentials times the scales of their values. A value that is not finite
    // has a score that is none, so the row's sum of exponentials is NaN already.
    void prepare(const float* exponentials, Range seen, int64_t r) {
        const Range granules = granules_of(seen);
        float weights[kBlock];
        F16 largest = broadcast(0.0f);
        for (int g = granules.begin; g < granules.end; ++g) {
            const auto* scales = reinterpret_cast<const float*>(block_->here.values[g] + kGranule * width_);
            const F16 weight = load(exponentials + g * kGranule) * load(scales);
            store(weights + g * kGranule, weight);
            largest = max(weight, largest);  // NaN, of a key that is not seen as well, counts for nothing
        }
        const float bound = horizontal_max(largest);
        const F16 inverse = broadcast(bound < kLeast ? 0.0f : kMostWhole / bound), none = broadcast(0.0f);
        WholeRow row(weights_, r, kBlock);
        for (int g = granules_.begin; g < granules_.end; ++g) {
            const bool used = granules.holds(g);
            const F16 weight = used ? max(load(weights + g * kGranule) * inverse, none) : none;
            row.put(g * kGranule, weight);
        }
        corrections_[r] = row.correction();
        scales_[r] = bound < kLeast ? 0.0f : bound / kMostWhole;
    }

    // out [Rows, stride] = weights times values, of dimensions d, d + 1, … Beyond the head's last one it is anything.
    template <int Rows, int Vectors>
    __attribute__((noinline)) void add_dimensions(int64_t d, float* out) const {
        I16 sums[kParts * Rows][Vectors];
        begin(sums, corrections_);
        for (int g = granules_.begin; g < granules_.end; ++g) {
            Int8Product product{weights_ + g * kGranule, kBlock, {}, {}, 4 * width_};
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) {
                product.bytes[v] = block_->here.values[g] + 4 * (d + 16 * v);
                product.ahead[v] = block_->fetched.values[g] + 4 * (d + 16 * v);
            }
            if (d == 0) prefetch_to_l2(block_->fetched.values[g] + kGranule * width_);
            accumulate(product, 0, kGranule / 4, sums);
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const F16 scale = broadcast(scales_[r]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(out + r * stride_ + 16 * v, whole_sum(sums, r, v) * scale);
        }
    }

    const HeadGranules<uint8_t>* block_ = nullptr;
    int64_t stride_ = 0, width_ = 0;  // head_dim in whole vectors; of a token in the cache
    Range granules_{0, 0};            // that some row sees
    alignas(64) Activation weights_[kParts * kInt8Rows * kBlock];
    int32_t corrections_[kInt8Rows];
    float scales_[kInt8Rows];
};

}  // namespace
}  // namespace pellucid
