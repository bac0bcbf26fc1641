// Chooses the next token of every row. pellucid_server/engine/sampler_reference.py is the specification, step by step;
// this file gives the same token for every input, and names the steps by the same numbers.
//
// Why it may be faster and still be equal: weights are integers, so their sums need no order; the noise of a token
// depends on nothing else, so tokens that cannot win are skipped; double arithmetic, exp and log are the same.
//
// In: logits and one Row of settings per row. Out: one id per row, or -1 for a non-finite row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace {

// Settings of one row, as packed by pellucid_server/engine/sampler.py.
struct Row {
    double temperature;
    double top_p;
    double min_p;
    uint64_t seed;
    int64_t banned_begin;  // its banned ids are banned_ids[banned_begin, banned_end)
    int64_t banned_end;
    uint32_t top_k;
    uint32_t sequence_index;
    uint32_t output_index;
    uint32_t padding;
};
static_assert(sizeof(Row) == 64);

constexpr float kImpossible = -std::numeric_limits<float>::infinity();
constexpr double kWeightScale = 1099511627776.0;  // 2^40
constexpr double kWeightless = -27.8;             // up to this z, exp(z) * 2^40 < 1

// ---- Noise ----------------------------------------------------------------------------------------------------------

// First word of Philox4x32-10.
inline uint32_t philox_word(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t k0, uint32_t k1) {
    uint32_t c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(product1);
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

inline double gumbel(uint32_t word) {
    const double uniform = (word + 0.5) * 0x1p-32;
    return -std::log(-std::log(uniform));
}

// ceiling[word >> 22] is at least the noise of that word, so that most words need no logarithm. The margin is far
// above the rounding of log, and a ceiling that is too high costs time only.
struct NoiseCeiling {
    double ceiling[1024];
    NoiseCeiling() {
        for (uint32_t i = 0; i < 1024; ++i) ceiling[i] = gumbel((i << 22) | 0x3FFFFF) + 1e-9;
    }
    double operator()(uint32_t word) const { return ceiling[word >> 22]; }
};
const NoiseCeiling noise_ceiling;

// ---- Selection ------------------------------------------------------------------------------------------------------

// Larger is earlier in the order (logit descending, id ascending). Adding 0 makes -0 equal to 0.
inline uint64_t order_key(float logit, uint32_t id) {
    const float value = logit + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (uint64_t{bits} << 32) | (0xFFFFFFFFu - id);
}

inline uint32_t id_of(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

// What a thread needs for a row; kept for as long as the thread lives, so that its memory is allocated once.
struct Scratch {
    std::vector<float> masked;      // [V], a row with its banned ids at -inf
    std::vector<uint32_t> ids;      // what is left of the row, in any order
    std::vector<double> z;          // z of ids[i]
    std::vector<uint64_t> weights;  // step 5's weight of ids[i]
    std::vector<uint64_t> keys;     // order keys while selecting
};

// Step 1. False if an id below `vocab` has NaN or +inf.
bool is_clean(const float* row, int64_t vocab) {
    bool clean = true;
    for (int64_t i = 0; i < vocab; ++i) clean &= row[i] < std::numeric_limits<float>::infinity();
    return clean;
}

// Step 2. The lowest id with the highest logit, or -1 if no id is possible.
int64_t argmax(const float* row, int64_t vocab) {
    constexpr int kLanes = 16;  // independent maxima, because a single one waits for itself
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, kImpossible);
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j];
    float highest = *std::max_element(lanes, lanes + kLanes);
    for (; i < vocab; ++i) highest = std::max(highest, row[i]);
    return highest == kImpossible ? -1 : std::find(row, row + vocab, highest) - row;
}

// Step 4 off: every id is left, impossible ones too; their z is -inf, so they never win.
void keep_all(int64_t vocab, Scratch& s) {
    s.ids.resize(vocab);
    std::iota(s.ids.begin(), s.ids.end(), 0u);
}

// Step 4. The buffer takes whatever beats the bar; when it is full, all but the best k go and the bar rises.
void keep_top_k(const float* row, int64_t vocab, size_t k, Scratch& s) {
    const size_t capacity = std::max<size_t>(2 * k, 256);
    auto& keys = s.keys;
    keys.clear();
    float bar = kImpossible;
    const auto shrink = [&] {
        std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<>());
        keys.resize(k);
        bar = row[id_of(keys[k - 1])];
    };
    for (int64_t i = 0; i < vocab; ++i) {
        if (!(row[i] > bar)) continue;  // Ids ascend: at the bar itself, earlier ids have won.
        keys.push_back(order_key(row[i], static_cast<uint32_t>(i)));
        if (keys.size() == capacity) shrink();
    }
    if (keys.size() > k) shrink();
    s.ids.resize(keys.size());
    std::transform(keys.begin(), keys.end(), s.ids.begin(), id_of);
}

// Step 3, for the ids that are left.
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

// Step 5. Weights are summed in buckets of z, which follow the order, so only the bucket in which the sum reaches its
// mark is sorted. Weightless ids come last and are never needed to reach it.
void keep_top_p(const float* row, double top_p, Scratch& s) {
    constexpr size_t kBuckets = 1024;
    uint64_t mass[kBuckets] = {};
    const auto bucket_of = [&](size_t i) {
        return std::min(static_cast<size_t>(s.z[i] * (kBuckets / kWeightless)), kBuckets - 1);
    };
    const auto key_of = [&](size_t i) { return order_key(row[s.ids[i]], s.ids[i]); };

    keep_where(s, [&](size_t i) { return s.z[i] > kWeightless; });
    s.weights.resize(s.ids.size());
    for (size_t i = 0; i < s.ids.size(); ++i) {
        s.weights[i] = static_cast<uint64_t>(std::exp(s.z[i]) * kWeightScale);
        mass[bucket_of(i)] += s.weights[i];
    }
    const double mark = top_p * static_cast<double>(std::accumulate(mass, mass + kBuckets, uint64_t{0}));
    size_t last = 0;
    uint64_t reached = 0;
    while (static_cast<double>(reached + mass[last]) < mark) reached += mass[last++];

    std::vector<size_t> bucket;
    for (size_t i = 0; i < s.ids.size(); ++i)
        if (bucket_of(i) == last) bucket.push_back(i);
    std::sort(bucket.begin(), bucket.end(), [&](size_t a, size_t b) { return key_of(a) > key_of(b); });
    size_t count = 0;
    do reached += s.weights[bucket[count++]];
    while (static_cast<double>(reached) < mark);
    const uint64_t bar = key_of(bucket[count - 1]);
    keep_where(s, [&](size_t i) { return key_of(i) >= bar; });
}

// Step 7.
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
            words[i] = philox_word(ids[i], settings.output_index, settings.sequence_index, k0, k1);
        for (size_t i = 0; i < size; ++i) {
            if (z[i] + noise_ceiling(words[i]) < best) continue;
            const double score = z[i] + gumbel(words[i]);
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
    if (!is_clean(row, vocab)) return -1;
    if (settings.banned_begin < settings.banned_end) {
        s.masked.assign(row, row + vocab);
        for (int64_t i = settings.banned_begin; i < settings.banned_end; ++i)
            if (banned_ids[i] >= 0 && banned_ids[i] < vocab) s.masked[banned_ids[i]] = kImpossible;
        row = s.masked.data();
    }
    const int64_t first = argmax(row, vocab);
    if (first < 0 || settings.temperature == 0 || settings.top_k == 1) return static_cast<int32_t>(first);

    if (settings.top_k > 0 && settings.top_k < vocab)
        keep_top_k(row, vocab, settings.top_k, s);
    else
        keep_all(vocab, s);
    compute_z(row, double{row[first]}, settings.temperature, s);
    if (settings.top_p < 1) keep_top_p(row, settings.top_p, s);
    if (settings.min_p > 0) keep_where(s, [&](size_t i) { return std::exp(s.z[i]) >= settings.min_p; });
    return static_cast<int32_t>(draw(settings, s));
}

}  // namespace

// logits      [rows][stride], of which ids 0 … vocab - 1 may be chosen
// settings    [rows]
// banned_ids  see Row
// threads     at most so many, at least 1; no result depends on it
// out         [rows], ids, -1 for a non-finite row
extern "C" void pellucid_sample(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const void* settings,
                                const int32_t* banned_ids, int threads, int32_t* out) {
    const Row* row_settings = static_cast<const Row*>(settings);
    const int most = static_cast<int>(std::clamp<int64_t>(rows, 1, threads));
    pellucid::for_each_unit(pellucid::useful_threads(most, rows * vocab), rows, [&](int64_t i, int) {
        static thread_local Scratch scratch;
        out[i] = sample_row(logits + i * stride, vocab, row_settings[i], banned_ids, scratch);
    });
}
