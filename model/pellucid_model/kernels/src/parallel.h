// How threads share work. No result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pellucid {

// Calls call(context, member) on up to `threads` threads at the same time, the members of a team: the caller, as member
// 0, and those that are there in time. Returns when no member is inside any more.
//
// Every member makes the same for_each_unit calls in the same order, and each of these calls is one for all of them: they
// share out its units, and go on when all units are done. What a member does between them is for itself. One that is late
// goes through what the others have done without it, or is left out; one that ends early leaves its work to the others.
void run_team(int threads, void (*call)(void*, int), void* context);

// Where a thread is: in no team, a member of one, or in a unit, where it is alone.
enum class Standing { kOutside, kMember, kInUnit };
Standing standing();

// call(context), which may take long and shares no work: meanwhile this member is out of its team, and nobody waits for it.
void step_aside(void (*call)(void*), void* context);

// What this member does over and over while it waits for others, until it is told something else or leaves the team: a
// little at a time. False: there is nothing to do. Null: nothing.
void while_waiting(bool (*call)(void*), void* context);

// A member's part in one such call: see for_each_unit.
void share_units(int threads, int64_t units, void (*call)(void*, int64_t, int), void* context);

namespace {

// body(member) by each member of a team; see run_team.
template <class Body>
void work_together(int threads, const Body& body) {
    if (threads <= 1 || standing() != Standing::kOutside) return body(0);
    const auto call = [](void* context, int member) { (*static_cast<const Body*>(context))(member); };
    run_team(threads, call, const_cast<Body*>(&body));
}

// body(unit, worker) for every unit in [0, units), on at most `threads` threads; returns when all are done. `worker` is in
// [0, threads) and differs between units that are worked on at the same time.
template <class Body>
void for_each_unit(int threads, int64_t units, const Body& body) {
    const Standing own = standing();
    if (own == Standing::kInUnit || (own == Standing::kOutside && (threads <= 1 || units <= 1))) {
        for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
        return;
    }
    const auto call = [](void* context, int64_t unit, int worker) { (*static_cast<const Body*>(context))(unit, worker); };
    const auto share = [&](int) { share_units(threads, units, call, const_cast<Body*>(&body)); };
    own == Standing::kMember ? share(0) : work_together(threads, share);
}

// Bringing a thread in costs about a microsecond, a tenth of that where it is a member already: give each at least about
// so many multiply-adds, or things as costly.
constexpr int64_t kWorkPerThread = 100'000, kWorkPerMember = 25'000;

inline int useful_threads(int threads, int64_t work) {
    const Standing own = standing();
    if (own == Standing::kInUnit) return 1;
    const int64_t each = own == Standing::kMember ? kWorkPerMember : kWorkPerThread;
    return static_cast<int>(std::clamp<int64_t>(work / each, 1, threads));
}

// Where the share of the units that `worker` begins with begins.
inline int64_t first_unit(int worker, int64_t units, int threads) { return units * worker / threads; }

// Cuts `total` rows into the fewest parts of at most `most`, whose sizes differ by at most one.
struct EvenParts {
    int64_t total, count;

    EvenParts(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
    int64_t begin(int64_t part) const { return total * part / count; }
    int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
};

// body(row) for every row, each of which is worth `work`; some rows are a unit.
template <class Body>
void for_each_row(int threads, int64_t rows, int64_t work, const Body& body) {
    threads = useful_threads(threads, rows * work);
    const EvenParts parts(rows, std::max<int64_t>(1, (rows + 4 * threads - 1) / (4 * threads)));
    for_each_unit(threads, parts.count, [&](int64_t part, int) {
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row) body(row);
    });
}

}  // namespace
}  // namespace pellucid
