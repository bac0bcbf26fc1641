// Memory that an operator needs while it runs, kept for the next one.
#pragma once

#include <cstdlib>
#include <memory>

namespace pellucid {
namespace {

enum Use { kPreparedRows, kNormalisedRow, kAttentionPartials };

// At least `count` numbers, uninitialised, aligned to a cache line, valid until the same thread asks for the same again.
template <class T, Use>
T* scratch(int64_t count) {
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    static thread_local std::unique_ptr<T, Free> held;
    static thread_local int64_t size = 0;
    if (size < count) {
        held.reset();  // before there is more
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        held.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
        size = count;
    }
    return held.get();
}

}  // namespace
}  // namespace pellucid
