// Log-probabilities and ranks of chosen ids, and of the likeliest ones, in rows of logits. What is computed,
// pellucid_server/engine/logprobs_reference.py says.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "parallel.h"
#include "selection.h"

namespace {

constexpr double kLowest = std::numeric_limits<float>::lowest();

struct Normalizer {
    double highest;
    double log_sum;  // log of the sum of exp(logit - highest)
    bool finite;

    double logprob(float logit) const { return std::max(kLowest, (double{logit} - highest) - log_sum); }
};

// exp(x) for x <= 0 to about 1e-15 of it, in operations that compilers vectorise. Below -700 it is that of -700, next
// to nothing beside the 1 of the highest logit.
inline double exp_of_negative(double x) {
    constexpr double kShift = 0x1.8p52;  // what is added to this is rounded to an integer, in the last bits of the sum
    constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
    x = x < -700.0 ? -700.0 : x;
    const double shifted = x * 1.4426950408889634 + kShift;
    const double n = shifted - kShift;
    const double r = (x - n * kLn2High) - n * kLn2Low;  // exp(x) = 2^n exp(r), |r| <= ln 2 / 2
    double sum = 1.0 / 479001600;                       // Taylor's series up to r^12
    for (const double factorial :
         {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
        sum = sum * r + 1.0 / factorial;
    return std::bit_cast<double>(std::bit_cast<int64_t>(sum) + (std::bit_cast<int64_t>(shifted) << 52));
}

// Lanes, because a single sum waits for itself; their order is fixed, so the sum is too.
Normalizer normalize(const float* row, int64_t vocab) {
    constexpr int kLanes = 8;
    const auto [highest, id, clean] = pellucid::find_highest(row, vocab);
    if (!clean || highest == -std::numeric_limits<float>::infinity()) return {0, 0, false};
    double sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes)
        for (int j = 0; j < kLanes; ++j) sums[j] += exp_of_negative(double{row[i + j]} - double{highest});
    for (int j = 0; i < vocab; ++i, ++j) sums[j] += exp_of_negative(double{row[i]} - double{highest});
    double sum = 0;
    for (const double lane : sums) sum += lane;
    return {double{highest}, std::log(sum), true};
}

// 1 for the id that comes first in the order (logit descending, id ascending).
int32_t rank_of(const float* row, int64_t vocab, int64_t id) {
    const float logit = row[id];
    int32_t before = 0;
    for (int64_t i = 0; i < id; ++i) before += row[i] >= logit;
    for (int64_t i = id + 1; i < vocab; ++i) before += row[i] > logit;
    return before + 1;
}

}  // namespace

// logits       [rows][stride], of which ids 0 … vocab - 1 make up the distribution
// asked        the ids asked for: those of row r are asked[asked_begin[r], asked_begin[r + 1])
// top_begin    row r has room for its likeliest ids in [top_begin[r], top_begin[r + 1]); where a row has fewer whose
//              logit is above -inf, the rest is -1
// out          logprobs and ranks beside `asked`, ids and logprobs of the likeliest; finite[r] 0: row r has no answer.
//              An id beyond the vocabulary has the lowest logprob and rank 0.
extern "C" void pellucid_logprobs(const float* logits, int64_t rows, int64_t stride, int64_t vocab,
                                  const int32_t* asked, const int64_t* asked_begin, const int64_t* top_begin,
                                  int threads, double* logprobs, int32_t* ranks, int32_t* top_ids,
                                  double* top_logprobs, uint8_t* finite) {
    const int most = static_cast<int>(std::clamp<int64_t>(rows, 1, threads));
    pellucid::for_each_unit(pellucid::useful_threads(most, rows * vocab), rows, [&](int64_t r, int) {
        static thread_local std::vector<uint64_t> keys;
        const float* row = logits + r * stride;
        const Normalizer normalizer = normalize(row, vocab);
        finite[r] = normalizer.finite;
        if (!normalizer.finite) return;
        for (int64_t i = asked_begin[r]; i < asked_begin[r + 1]; ++i) {
            const bool known = asked[i] >= 0 && asked[i] < vocab;
            logprobs[i] = known ? normalizer.logprob(row[asked[i]]) : kLowest;
            ranks[i] = known ? rank_of(row, vocab, asked[i]) : 0;
        }
        const int64_t begin = top_begin[r], end = top_begin[r + 1];
        if (begin == end) return;
        pellucid::select_top_k(row, vocab, static_cast<size_t>(end - begin), keys);
        std::sort(keys.begin(), keys.end(), std::greater<>());
        std::fill(top_ids + begin, top_ids + end, -1);
        for (size_t i = 0; i < keys.size(); ++i) {
            const uint32_t id = pellucid::id_of(keys[i]);
            top_ids[begin + i] = static_cast<int32_t>(id);
            top_logprobs[begin + i] = normalizer.logprob(row[id]);
        }
    });
}
