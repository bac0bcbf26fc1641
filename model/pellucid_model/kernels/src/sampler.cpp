// Chooses the next token of every row. pellucid_server/engine/sampler_reference.py is the specification, step by step;
// this file gives the same token for every input, and names the steps by the same numbers.
//
// Why it may be faster and still be equal: weights are integers, so their sums need no order; the noise of a token
// depends on nothing else, so tokens that cannot win are skipped; double arithmetic, exp and log are the same.
//
// In: logits and one Row of settings per row. Out: one id per row, or -1 where there is no answer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "noise.h"
#include "parallel.h"
#include "sampler_row.h"
#include "selection.h"

namespace {

using pellucid::Row;

constexpr float kImpossible = -std::numeric_limits<float>::infinity();
constexpr double kWeightScale = 1099511627776.0;  // 2^40
constexpr double kWeightless = -27.8;             // up to this z, exp(z) * 2^40 < 1

// ---- What a row needs -----------------------------------------------------------------------------------------------

// What a thread needs for a row; kept for as long as the thread lives, so that its memory is allocated once.
struct Scratch {
    std::vector<float> logits;      // [V], a row with its changes
    std::vector<uint32_t> ids;      // what is left of the row, in any order
    std::vector<double> z;          // z of ids[i]
    std::vector<uint64_t> weights;  // step 7's weight of ids[i]
    std::vector<uint64_t> keys;     // order keys while selecting
};

// ---- Changes of logits ----------------------------------------------------------------------------------------------

// The nearest float; the largest where x is finite but beyond it.
float saturate(double x) {
    constexpr double most = std::numeric_limits<float>::max();
    return static_cast<float>(std::isinf(x) ? x : std::clamp(x, -most, most));
}

// Calls change(place in the list, logit) for every listed id of the vocabulary.
template <class Change>
void for_each_logit(std::vector<float>& logits, const int32_t* ids, size_t count, const Change& change) {
    for (size_t i = 0; i < count; ++i)
        if (ids[i] >= 0 && static_cast<size_t>(ids[i]) < logits.size()) change(i, logits[ids[i]]);
}

// Step 1, allowed ids.
void copy_allowed(const float* row, int64_t vocab, const Row& settings, std::vector<float>& logits) {
    if (settings.allowed_count == 0) {
        logits.assign(row, row + vocab);
        return;
    }
    logits.assign(vocab, kImpossible);
    const int32_t* ids = settings.allowed_ids;
    for_each_logit(logits, ids, settings.allowed_count, [&](size_t i, float& logit) { logit = row[ids[i]]; });
}

// Step 1, the constraint.
void keep_permitted(const uint32_t* permitted, std::vector<float>& logits) {
    const size_t vocab = logits.size();
    for (size_t begin = 0; begin < vocab; begin += 32) {
        const uint32_t word = permitted[begin / 32];
        if (word == 0xFFFFFFFFu) continue;
        const size_t size = std::min<size_t>(32, vocab - begin);
        for (size_t i = 0; i < size; ++i)
            if (!(word >> i & 1)) logits[begin + i] = kImpossible;
    }
}

// Step 3.
void penalize(const Row& r, std::vector<float>& logits) {
    for_each_logit(logits, r.seen_ids, r.seen_count, [&](size_t i, float& logit) {
        if (r.repetition_penalty != 1)
            logit = saturate(logit > 0 ? logit / r.repetition_penalty : logit * r.repetition_penalty);
        const double count = r.output_counts[i];
        if (count > 0) logit = saturate(logit - (r.presence_penalty + r.frequency_penalty * count));
    });
}

// Steps 1 to 3. Impossible logits stay what they are under biases and penalties, so they may be set first.
const float* change_logits(const float* row, int64_t vocab, const Row& settings, const int32_t* banned_ids,
                           Scratch& s) {
    copy_allowed(row, vocab, settings, s.logits);
    if (settings.permitted) keep_permitted(settings.permitted, s.logits);
    const size_t banned_count = settings.banned_end - settings.banned_begin;
    for_each_logit(s.logits, banned_ids + settings.banned_begin, banned_count,
                   [](size_t, float& logit) { logit = kImpossible; });
    for_each_logit(s.logits, settings.bias_ids, settings.bias_count,
                   [&](size_t i, float& logit) { logit = saturate(logit + settings.biases[i]); });
    if (settings.penalizes()) penalize(settings, s.logits);
    return s.logits.data();
}

// ---- Selection ------------------------------------------------------------------------------------------------------

// Step 6 off: every id is left, impossible ones too; their z is -inf, so they never win.
void keep_all(int64_t vocab, Scratch& s) {
    s.ids.resize(vocab);
    std::iota(s.ids.begin(), s.ids.end(), 0u);
}

// Step 6.
void keep_top_k(const float* row, int64_t vocab, size_t k, Scratch& s) {
    pellucid::select_top_k(row, vocab, k, s.keys);
    s.ids.resize(s.keys.size());
    std::transform(s.keys.begin(), s.keys.end(), s.ids.begin(), pellucid::id_of);
}

// Step 5, for the ids that are left.
void compute_z(const float* row, double highest, double temperature, Scratch& s) {
    s.z.resize(s.ids.size());
    for (size_t i = 0; i < s.ids.size(); ++i) s.z[i] = (double{row[s.ids[i]]} - highest) / temperature;
}

// Keeps the ids (and their z) whose index satisfies `wanted`.
template <class Predicate>
void keep_where(Scratch& s, Predicate wanted) {
    size_t kept = 0;
    for (size_t i = 0; i < s.ids.size(); ++i) {
        if (!wanted(i)) continue;
        s.ids[kept] = s.ids[i];
        s.z[kept++] = s.z[i];
    }
    s.ids.resize(kept);
    s.z.resize(kept);
}

// Weighs the ids that are left and drops those that weigh nothing.
void weigh(Scratch& s) {
    keep_where(s, [&](size_t i) { return s.z[i] > kWeightless; });
    s.weights.resize(s.ids.size());
    size_t kept = 0;
    for (size_t i = 0; i < s.ids.size(); ++i) {
        const uint64_t weight = static_cast<uint64_t>(std::exp(s.z[i]) * kWeightScale);
        if (weight == 0) continue;
        s.ids[kept] = s.ids[i];
        s.z[kept] = s.z[i];
        s.weights[kept++] = weight;
    }
    s.ids.resize(kept);
    s.z.resize(kept);
    s.weights.resize(kept);
}

uint64_t total_weight(const Scratch& s) { return std::accumulate(s.weights.begin(), s.weights.end(), uint64_t{0}); }

using Place = std::pair<double, uint32_t>;  // Ids are ordered by this; the lowest comes first.

// Keeps the shortest beginning, in the order of place_of(id, z), that holds `share` of the weight. Weights are summed
// in buckets of distance_of(z), in [0, -kWeightless], which follows the same order; so only the bucket in which the sum
// reaches its mark is sorted. Ids have been weighed.
template <class DistanceOf, class PlaceOf>
void keep_share(double share, Scratch& s, const DistanceOf& distance_of, const PlaceOf& place_of) {
    constexpr size_t kBuckets = 1024;
    uint64_t mass[kBuckets] = {};
    const auto bucket_of = [&](size_t i) {
        return std::min(static_cast<size_t>(distance_of(s.z[i]) * (kBuckets / -kWeightless)), kBuckets - 1);
    };
    for (size_t i = 0; i < s.ids.size(); ++i) mass[bucket_of(i)] += s.weights[i];
    const double mark = share * static_cast<double>(total_weight(s));
    size_t last = 0;
    uint64_t reached = 0;
    while (static_cast<double>(reached + mass[last]) < mark) reached += mass[last++];

    std::vector<std::pair<Place, uint64_t>> bucket;
    for (size_t i = 0; i < s.ids.size(); ++i)
        if (bucket_of(i) == last) bucket.emplace_back(place_of(s.ids[i], s.z[i]), s.weights[i]);
    std::sort(bucket.begin(), bucket.end());
    size_t count = 0;
    do reached += bucket[count++].second;
    while (static_cast<double>(reached) < mark);
    const Place bar = bucket[count - 1].first;
    keep_where(s, [&](size_t i) { return place_of(s.ids[i], s.z[i]) <= bar; });
}

// Step 7.
void keep_top_p(const float* row, double top_p, Scratch& s) {
    weigh(s);
    keep_share(
        top_p, s, [](double z) { return -z; }, [&](uint32_t id, double) { return Place{-double{row[id]}, id}; });
}

// Step 9.
void keep_typical(double typical_p, Scratch& s) {
    weigh(s);
    uint64_t sum = 0;
    for (size_t i = 0; i < s.ids.size(); ++i) sum += static_cast<uint64_t>(static_cast<double>(s.weights[i]) * -s.z[i]);
    const double mean = -(static_cast<double>(sum) / static_cast<double>(total_weight(s)));
    const auto distance_of = [&](double z) { return std::abs(z - mean); };
    keep_share(typical_p, s, distance_of, [&](uint32_t id, double z) { return Place{distance_of(z), id}; });
}

// Step 10.
uint32_t draw(const Row& settings, const Scratch& s) {
    constexpr size_t kBlock = 256;
    const uint32_t k0 = static_cast<uint32_t>(settings.seed), k1 = static_cast<uint32_t>(settings.seed >> 32);
    double best = -std::numeric_limits<double>::infinity();
    uint32_t best_id = 0xFFFFFFFFu;
    for (size_t begin = 0; begin < s.ids.size(); begin += kBlock) {
        const size_t size = std::min(kBlock, s.ids.size() - begin);
        const uint32_t* ids = s.ids.data() + begin;
        const double* z = s.z.data() + begin;
        uint32_t words[kBlock];
        for (size_t i = 0; i < size; ++i)
            words[i] = pellucid::philox_word(ids[i], settings.output_index, settings.sequence_index, k0, k1);
        for (size_t i = 0; i < size; ++i) {
            if (z[i] + pellucid::noise_ceiling(words[i]) < best) continue;
            const double score = z[i] + pellucid::gumbel(words[i]);
            if (score > best || (score == best && ids[i] < best_id)) {
                best = score;
                best_id = ids[i];
            }
        }
    }
    return best_id;
}

// ---- A row ----------------------------------------------------------------------------------------------------------

int32_t sample_row(const float* row, int64_t vocab, const Row& settings, const int32_t* banned_ids, Scratch& s) {
    pellucid::Highest first = pellucid::find_highest(row, vocab);
    if (!first.clean) return -1;  // Step 1.
    if (settings.changes_logits()) {
        row = change_logits(row, vocab, settings, banned_ids, s);
        first = pellucid::find_highest(row, vocab);
    }
    if (first.logit == kImpossible) return -1;
    if (settings.temperature == 0 || settings.top_k == 1) return static_cast<int32_t>(first.id);  // Step 4.

    if (settings.top_k > 0 && settings.top_k < vocab)
        keep_top_k(row, vocab, settings.top_k, s);
    else
        keep_all(vocab, s);
    compute_z(row, double{first.logit}, settings.temperature, s);
    if (settings.top_p < 1) keep_top_p(row, settings.top_p, s);
    if (settings.min_p > 0) keep_where(s, [&](size_t i) { return std::exp(s.z[i]) >= settings.min_p; });
    if (settings.typical_p < 1) keep_typical(settings.typical_p, s);
    return static_cast<int32_t>(draw(settings, s));
}

}  // namespace

extern "C" void pellucid_sample(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const Row* settings,
                                const int32_t* banned_ids, int threads, int32_t* out) {
    const int most = static_cast<int>(std::clamp<int64_t>(rows, 1, threads));
    pellucid::for_each_unit(pellucid::useful_threads(most, rows * vocab), rows, [&](int64_t i, int) {
        static thread_local Scratch scratch;
        out[i] = sample_row(logits + i * stride, vocab, settings[i], banned_ids, scratch);
    });
}
