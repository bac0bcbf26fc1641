// How the operators share work between threads. No result depends on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pellucid {
namespace {

// Waking a thread costs microseconds: give each one at least about `kWorkPerThread` multiply-adds (or as costly things).
constexpr int64_t kWorkPerThread = 100'000;

inline int useful_threads(int threads, int64_t work) {
    return static_cast<int>(std::clamp<int64_t>(work / kWorkPerThread, 1, threads));
}

// Work units 0, 1, … that threads claim one by one, so that a busy core delays nobody but itself.
class WorkQueue {
public:
    explicit WorkQueue(int64_t units) : units_(units) {}

    // Calls body(unit) until nothing is left. Every thread of a parallel region calls this.
    template <class Body>
    void drain(const Body& body) {
        for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units_;) body(unit);
    }

private:
    const int64_t units_;
    std::atomic<int64_t> next_{0};
};

// Cuts `total` rows into the fewest parts of at most `most`, whose sizes differ by at most one.
struct EvenParts {
    int64_t total, count;

    EvenParts(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
    int64_t begin(int64_t part) const { return total * part / count; }
    int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
};

}  // namespace
}  // namespace pellucid
