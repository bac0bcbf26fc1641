// Where the keys and values of a key block lie: finds them in the cache by the block table.
#pragma once

#include <vector>

#include "attention_cache.h"

namespace pellucid {
namespace {

constexpr int kBlock = 128;  // keys per partial softmax
constexpr int kGranules = kBlock / kGranule;
constexpr int64_t kSmallBlock = 16 << 10;  // bytes of a block's keys and values, two of which the nearest cache holds
constexpr int kSomeLines = 48;  // to be prefetched between two products of attention, for each row

// The granules of a key block, of one kv head.
template <class Number>
struct Granules {
    const Number *keys[kGranules], *values[kGranules];
};

// Those of one head, and what the products with its keys and with its values prefetch.
template <class Number>
struct HeadGranules {
    Granules<Number> here, fetched;
};

// Where a key block is: its first position in a sequence, of one kv head, or of some from there on. Nobody sees anything
// from `end` on.
struct KeyBlock {
    int64_t sequence, kv_head;
    int32_t start, end;
};

// Looks them up for one sequence at a time, and for one kv head of it or several.
template <class Format>
class GranuleFinder {
    using Number = typename Format::Number;

public:
    // Whether granules are read as they lie, and so those of several heads can be looked up together.
    static bool are_whole(const Arguments& a) { return HeadLayout<Format>(a.head_dim, a.block_size).granule == kGranule; }

    void start(const Arguments& arguments, int64_t sequence, int64_t kv_head, int64_t heads) {
        a_ = &arguments;
        sequence_ = sequence;
        kv_head_ = kv_head;
        heads_ = heads;
        layout_ = HeadLayout<Format>(a_->head_dim, a_->block_size);
        head_step_ = a_->block_size * layout_.stride;
        nothing_.resize(kGranule * layout_.stride);
        is_small_ = layout_.granule == kGranule && 2 * kBlock * layout_.stride * int64_t{sizeof(Number)} <= kSmallBlock;
    }

    // Finds the granules of the keys from position `start` on, of which rows see `local` (from start), `seen` in all,
    // and those of the block that is needed next. False if the table does not hold one that a row sees.
    bool find(int32_t start, Range seen, const std::vector<Range>& local, const KeyBlock& next) {
        const int begin = seen.begin / kGranule, end = (seen.end + kGranule - 1) / kGranule;
        if (layout_.granule == kGranule) find_granules({sequence_, kv_head_, start, 0}, begin, end, here);
        for (int g = begin; g < end; ++g) {
            if (layout_.granule < kGranule) {
                if (!collect_granule(start, seen, local, g)) return false;
            } else if (!here.keys[g]) {
                if (is_seen(local, {g * kGranule, (g + 1) * kGranule})) return false;
                here.keys[g] = here.values[g] = nothing_.data();  // in a gap between what the rows see
            }
        }
        find_ahead(next);
        return true;
    }

    // Of the head that is `head` heads behind the first. Its products prefetch keys and values of the next head. Those of the
    // last one prefetch what is ahead, where blocks are small; where they are large, the product of its keys prefetches the
    // first head's values, which are needed soon, and that of its values the keys ahead. Of granules [first, last), none of
    // which is missing where there are several heads.
    HeadGranules<Number> of_head(int64_t head, int first, int last) const {
        HeadGranules<Number> own;
        for (int g = first; g < last; ++g) {
            own.here.keys[g] = here.keys[g] + head * head_step_;
            own.here.values[g] = here.values[g] + head * head_step_;
            if (head + 1 < heads_) {
                own.fetched.keys[g] = own.here.keys[g] + head_step_;
                own.fetched.values[g] = own.here.values[g] + head_step_;
            } else {
                own.fetched.keys[g] = is_small_ ? ahead.keys[g] : here.values[g];
                own.fetched.values[g] = is_small_ ? ahead.values[g] : ahead.keys[g];
            }
        }
        return own;
    }

    // Prefetches a little more of what is ahead, keys before values. To be called wherever nothing is read from memory, so that
    // it works all the time. Of several heads, or small blocks, the products alone fetch enough.
    void fetch_some() {
        const int64_t bytes = kGranule * layout_.stride * sizeof(Number);
        for (int line = 0; line < kSomeLines && fetched_ < 2 * kGranules; ++line) {
            const Number* granule = fetched_ < kGranules ? ahead.keys[fetched_] : ahead.values[fetched_ - kGranules];
            if (granule != nothing_.data()) {
                prefetch_to_l2(reinterpret_cast<const std::byte*>(granule) + fetched_bytes_);
                fetched_bytes_ += 64;
            }
            if (granule == nothing_.data() || fetched_bytes_ >= bytes) skip_to(fetched_ + 1);
        }
    }

    // The products of the keys and values that rows see have prefetched the first head's keys at the same places ahead.
    void skip(Range seen) {
        const int end = (seen.end + kGranule - 1) / kGranule;
        if (seen.begin < kGranule && fetched_ < end) skip_to(end);
    }

private:
    void skip_to(int granule) {
        fetched_ = granule;
        fetched_bytes_ = 0;
    }

    static bool is_seen(const std::vector<Range>& local, Range keys) {
        return std::any_of(local.begin(), local.end(),
                           [=](const Range& range) { return !range.clip(keys.begin, keys.end).empty(); });
    }

    // The cache block that holds a position of a sequence, or -1.
    int64_t block_of(int64_t sequence, int64_t position) const { return block_at(sequence, position / a_->block_size); }

    int64_t block_at(int64_t sequence, int64_t index) const {
        if (index >= a_->table_width) return -1;
        const int32_t block = a_->block_tables[sequence * a_->table_width + index];
        return block < a_->blocks ? block : -1;
    }

    // Finds granules [begin, end) of a key block; null: the table does not hold it.
    void find_granules(const KeyBlock& keys, int begin, int end, Granules<Number>& granules) const {
        const int64_t position = keys.start + begin * kGranule, size = a_->block_size;
        int64_t index = position / size, slot = position % size, block = block_at(keys.sequence, index);
        for (int g = begin; g < end; ++g) {
            const int64_t at = layout_.head(*a_, block, keys.kv_head) + slot * layout_.stride;
            granules.keys[g] = block < 0 ? nullptr : static_cast<const Number*>(a_->k_cache) + at;
            granules.values[g] = block < 0 ? nullptr : static_cast<const Number*>(a_->v_cache) + at;
            slot += kGranule;
            if (slot < size) continue;
            slot = 0;
            block = block_at(keys.sequence, ++index);
        }
    }

    // Puts a granule together from blocks that are smaller. False if one that a row sees is not held.
    bool collect_granule(int32_t start, Range seen, const std::vector<Range>& local, int g) {
        const int64_t size = kGranule * layout_.stride;
        collected_.resize(2 * kGranules * size);
        Number *keys = &collected_[2 * g * size], *values = keys + size;
        const HeadLayout<Format> whole(a_->head_dim, kGranule);
        here.keys[g] = keys;
        here.values[g] = values;
        seen = seen.clip(g * kGranule, (g + 1) * kGranule);
        for (int32_t key = seen.begin; key < seen.end; ++key) {
            const int64_t position = start + key, block = block_of(sequence_, position);
            if (block < 0 && is_seen(local, {key, key + 1})) return false;
            if (block < 0) continue;
            const int64_t head = layout_.head(*a_, block, kv_head_);
            copy_token(layout_, position % a_->block_size, static_cast<const Number*>(a_->k_cache) + head,
                       static_cast<const Number*>(a_->v_cache) + head, whole, key % kGranule, keys, values);
        }
        return true;
    }

    // What to prefetch, where there is any.
    void find_ahead(const KeyBlock& next) {
        skip_to(is_small_ || heads_ > 1 ? 2 * kGranules : 0);
        const int needed = std::clamp((next.end - next.start + kGranule - 1) / kGranule, 0, kGranules);
        const int end = layout_.granule == kGranule ? needed : 0;
        if (end > 0) find_granules(next, 0, end, ahead);
        for (int g = 0; g < kGranules; ++g)
            if (g >= end || !ahead.keys[g]) ahead.keys[g] = ahead.values[g] = nothing_.data();
    }

public:
    Granules<Number> here, ahead;  // found last; ahead: to be prefetched

private:
    const Arguments* a_ = nullptr;
    int64_t sequence_ = 0, kv_head_ = 0, heads_ = 1;
    HeadLayout<Format> layout_{1, 1};
    int64_t head_step_ = 0;  // from one head of a block to the next, in numbers
    AlignedVector<Number> collected_;  // granules of small blocks
    AlignedVector<Number> nothing_;    // a granule of zeros
    bool is_small_ = false;
    int fetched_ = 2 * kGranules;  // granules of what is ahead, keys and values
    int64_t fetched_bytes_ = 0;    // of the one that follows
};

}  // namespace
}  // namespace pellucid
