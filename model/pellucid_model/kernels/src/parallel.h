// How the operators share work between threads. No result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pellucid {

// Calls call(context, unit, worker) once for every unit in [0, units), on at most `threads` threads, and returns when all
// calls have returned. `worker` is in [0, threads) and differs between calls that run at the same time; 0 is the caller.
void run_units(int threads, int64_t units, void (*call)(void*, int64_t, int), void* context);

namespace {

// Waking a thread costs microseconds: give each one at least about `kWorkPerThread` multiply-adds (or as costly things).
constexpr int64_t kWorkPerThread = 100'000;

inline int useful_threads(int threads, int64_t work) {
    return static_cast<int>(std::clamp<int64_t>(work / kWorkPerThread, 1, threads));
}

// Where the share of the units that `worker` begins with begins.
inline int64_t first_unit(int worker, int64_t units, int threads) { return units * worker / threads; }

// body(unit, worker) for every unit; see run_units.
template <class Body>
void for_each_unit(int threads, int64_t units, const Body& body) {
    if (threads <= 1 || units <= 1) {
        for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
        return;
    }
    const auto call = [](void* context, int64_t unit, int worker) { (*static_cast<const Body*>(context))(unit, worker); };
    run_units(threads, units, call, const_cast<Body*>(&body));
}

// Cuts `total` rows into the fewest parts of at most `most`, whose sizes differ by at most one.
struct EvenParts {
    int64_t total, count;

    EvenParts(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
    int64_t begin(int64_t part) const { return total * part / count; }
    int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
};

}  // namespace
}  // namespace pellucid
