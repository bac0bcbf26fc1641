// A vector of numbers that begins with a line of the cache. What lies across two lines takes twice as long to read and to
// write, and a matrix unit's tile has sixteen rows of a line each.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace pellucid {
namespace {

template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}

    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
    bool operator==(const LineAllocator&) const = default;
};

template <class T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace
}  // namespace pellucid
