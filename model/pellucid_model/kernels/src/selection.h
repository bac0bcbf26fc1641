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

// What stands at the top of a row.
struct Highest {
    float logit;  // -inf for none
    int64_t id;   // the lowest one with this logit
    bool clean;   // false if an id below `vocab` has NaN or +inf; then the others say nothing
};

// One pass over the row: the highest logit is noted block by block, and only its own block is searched for its id.
inline Highest find_highest(const float* row, int64_t vocab) {
    constexpr int64_t kBlock = 512;
    constexpr int kLanes = 32;  // independent maxima, because a single one waits for itself
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    float highest = kLowest;
    int64_t best = 0;
    bool clean = true;
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        const float* block = row + begin;
        const int64_t size = std::min(kBlock, vocab - begin);
        float lanes[kLanes];
        int32_t fine[kLanes];
        std::fill(lanes, lanes + kLanes, kLowest);
        std::fill(fine, fine + kLanes, -1);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            for (int j = 0; j < kLanes; ++j) {
                lanes[j] = block[i + j] > lanes[j] ? block[i + j] : lanes[j];
                fine[j] &= block[i + j] < std::numeric_limits<float>::infinity() ? -1 : 0;
            }
        for (int j = 0; i < size; ++i, ++j) {
            lanes[j] = std::max(lanes[j], block[i]);
            fine[j] &= block[i] < std::numeric_limits<float>::infinity() ? -1 : 0;
        }
        for (const int32_t lane : fine) clean &= lane != 0;
        const float here = *std::max_element(lanes, lanes + kLanes);
        if (here > highest) highest = here, best = begin;
    }
    const float* end = row + std::min(best + kBlock, vocab);
    return {highest, std::find(row + best, end, highest) - row, clean};
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
    constexpr int64_t kBlock = 64;  // most blocks have nothing above the bar, which is seen at once
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, vocab);
        int32_t above = 0;
        for (int64_t i = begin; i < end; ++i) above += row[i] > bar;
        if (above == 0) continue;
        for (int64_t i = begin; i < end; ++i) {
            if (!(row[i] > bar)) continue;  // Ids ascend: at the bar itself, earlier ids have won.
            keys.push_back(order_key(row[i], static_cast<uint32_t>(i)));
            if (keys.size() == capacity) shrink();
        }
    }
    if (keys.size() > k) shrink();
}

}  // namespace
}  // namespace pellucid
