// Rows of logits: whether they make sense, and the order of their ids: the highest logit first, of equal ones the
// lowest id.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace pellucid {
namespace {

// False if an id below `vocab` has NaN or +inf.
inline bool is_clean(const float* row, int64_t vocab) {
    bool clean = true;
    for (int64_t i = 0; i < vocab; ++i) clean &= row[i] < std::numeric_limits<float>::infinity();
    return clean;
}

// The highest logit of a clean row; -inf for none.
inline float highest_logit(const float* row, int64_t vocab) {
    constexpr int kLanes = 16;  // independent maxima, because a single one waits for itself
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j];
    float highest = *std::max_element(lanes, lanes + kLanes);
    for (; i < vocab; ++i) highest = std::max(highest, row[i]);
    return highest;
}

// Larger is earlier in the order (logit descending, id ascending). Adding 0 makes -0 equal to 0.
inline uint64_t order_key(float logit, uint32_t id) {
    const float value = logit + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (uint64_t{bits} << 32) | (0xFFFFFFFFu - id);
}

inline uint32_t id_of(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

// The order keys of the first k ids of a row, in any order; k > 0. The buffer takes whatever beats the bar; when it is
// full, all but the best k go and the bar rises. Ids whose logit is -inf are left out.
inline void select_top_k(const float* row, int64_t vocab, size_t k, std::vector<uint64_t>& keys) {
    const size_t capacity = std::max<size_t>(2 * k, 256);
    keys.clear();
    float bar = -std::numeric_limits<float>::infinity();
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
}

}  // namespace
}  // namespace pellucid
