// What the products of a linear layer fetch, so that memory works while they multiply.
#pragma once

#include "cache_reading.h"
#include "linear_formats.h"

namespace pellucid {
namespace {

// Two runs of memory of the same length, the second one a gate's or null: what a thread reads next.
struct Weights {
    const std::byte *weights = nullptr, *gate = nullptr;
    int64_t bytes = 0;  // of each
};

// Gives out to products what they fetch, each the next part, until there is nothing more.
class Fetching {
public:
    // For `products` of them, which read `panel_bytes` each. reading: or null. distance: of weights that are read once,
    // what lies so many bytes ahead; 0: `next`, spread over all products.
    Fetching(const Weights& next, CacheReading* reading, int cached_shift, int64_t products, int64_t panel_bytes,
             int64_t distance)
        : next_(next),
          reading_(reading),
          cached_shift_(cached_shift),
          cached_part_(panel_bytes >> cached_shift),
          distance_(distance),
          total_(next.gate ? 2 * next.bytes : next.bytes) {
        while (panel_bytes >> (shift_ + 1) > 0 && (panel_bytes >> (shift_ + 1)) * products >= total_) ++shift_;
        part_ = panel_bytes >> shift_;
    }

    Ahead part(const std::byte* own_panel) {
        Ahead ahead{own_panel, Ahead::kNothing, own_panel, Ahead::kNothing};
        if (const std::byte* cached = reading_ ? reading_->next(cached_part_) : nullptr) {
            ahead.cached = cached;
            ahead.cached_shift = cached_shift_;
        }
        if (distance_ > 0) {
            ahead.weights = own_panel + distance_;
            ahead.shift = 0;
        } else if (const int64_t at = done_; at < total_) {
            ahead.weights = at < next_.bytes ? next_.weights + at : next_.gate + (at - next_.bytes);
            ahead.shift = shift_;
            done_ += part_;
        }
        return ahead;
    }

private:
    const Weights next_;
    CacheReading* const reading_;
    const int cached_shift_;
    const int64_t cached_part_, distance_;
    int64_t total_, part_ = 0, done_ = 0;
    int shift_ = 0;
};

}  // namespace
}  // namespace pellucid
