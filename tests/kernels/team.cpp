// Random programs for teams of threads (parallel.h). Says what is wrong and ends with 1, or how much was right.
//
//     team MOST_THREADS CALLERS SECONDS SEED
//
// A program is a row of rounds, each of which shares units out, and every unit needs all units of the round before.
// Members come late, are slow, end early, step aside or do something while they wait, and units call for further threads.
// What is shared is not atomic, so that the thread sanitizer sees whether the team orders it.
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

using namespace pellucid;
using std::chrono::microseconds;

namespace {

struct Round {
    int threads;
    std::vector<int> done;                  // [units], by whoever did it
    std::vector<std::atomic<int>> begun;    // [units], how often
    std::vector<std::atomic<bool>> is_busy;  // [threads], a worker

    Round(int threads, int units) : threads(threads), done(units, 0), begun(units), is_busy(threads) {}
    int units() const { return static_cast<int>(done.size()); }
};

struct Program {
    uint32_t seed;
    int threads;  // 1: no team, but each round may ask for one
    int leaver, leaves_at;  // a member that ends before that round; -1: none does
    std::deque<Round> rounds;
    std::atomic<bool> has_ended{false};   // the caller has been told so
    std::atomic<int> done_by_helpers{0};  // units
    std::atomic<int64_t> waits{0};
    std::atomic<int64_t> asides{0};

    Program(uint32_t seed, int most_threads) : seed(seed) {
        std::mt19937 random(seed);
        const auto draw = [&](int most) { return 1 + static_cast<int>(random() % most); };
        threads = draw(most_threads);
        const int most_units = draw(17), count = draw(30);
        for (int i = 0; i < count; ++i) rounds.emplace_back(draw(threads + 2), draw(most_units));
        leaver = threads > 1 && draw(4) == 1 ? draw(threads - 1) : -1;
        leaves_at = draw(count) - 1;
    }

    void expect(bool holds, const char* what) const {
        if (holds) return;
        std::fprintf(stderr, "seed %u: %s\n", seed, what);
        std::_Exit(1);
    }
};

// Lets others go ahead, or fall asleep, now and then.
void dawdle() {
    static std::atomic<uint32_t> threads{0};
    static thread_local std::minstd_rand random(++threads);
    const auto drawn = random() % 1000;
    if (drawn < 3) std::this_thread::sleep_for(microseconds(drawn * 150));
    if (drawn < 60) std::this_thread::yield();
}

// Within a unit a thread is alone.
void ask_for_threads(const Program& program) {
    const auto here = std::this_thread::get_id();
    int64_t units = 0, members = 0;
    for_each_unit(4, 3, [&](int64_t unit, int worker) {
        const bool is_alone = worker == 0 && std::this_thread::get_id() == here;
        program.expect(is_alone && unit == units++, "a unit shares its work");
    });
    work_together(4, [&](int member) {
        program.expect(member == 0 && std::this_thread::get_id() == here, "a unit starts a team");
        ++members;
    });
    program.expect(units == 3 && members == 1, "a call within a unit did not do all, or did it twice");
    program.expect(useful_threads(8, int64_t{1} << 40) == 1, "a unit is offered threads");
    program.expect(standing() == Standing::kInUnit, "a call within a unit ended the unit");
}

void do_unit(Program& program, size_t place, int64_t unit, int worker) {
    Round& round = program.rounds[place];
    program.expect(!program.has_ended, "a unit runs after the caller has returned");
    program.expect(0 <= worker && worker < round.threads, "a worker's number is out of range");
    program.expect(!round.is_busy[worker].exchange(true, std::memory_order_relaxed), "two workers have one number");
    program.expect(round.begun[unit].fetch_add(1, std::memory_order_relaxed) == 0, "a unit is done twice");
    if (place > 0)
        for (const int done : program.rounds[place - 1].done)
            program.expect(done != 0, "a round begins before the last one has ended");
    dawdle();
    if (standing() == Standing::kInUnit)
        ask_for_threads(program);
    else
        program.expect(program.threads == 1, "a member of a team does a unit as if it were alone");
    if (worker > 0) program.done_by_helpers.fetch_add(1, std::memory_order_relaxed);
    round.done[unit] = 1;
    round.is_busy[worker].store(false, std::memory_order_relaxed);
}

// What a member does while it waits, in every other round.
struct Waiting {
    Program& program;
    const std::thread::id here = std::this_thread::get_id();
    bool is_told = false;

    explicit Waiting(Program& program) : program(program) {}

    void begin_round(size_t place) {
        is_told = place % 2 == 0;
        while_waiting(is_told ? call : nullptr, this);
    }

    static bool call(void* context) {
        auto& own = *static_cast<Waiting*>(context);
        own.program.expect(own.is_told, "a member does while it waits what it was told to do before");
        own.program.expect(std::this_thread::get_id() == own.here, "a thread does what another one was told");
        own.program.expect(standing() == Standing::kMember, "a thread waits in a unit, or in no team");
        return own.program.waits.fetch_add(1, std::memory_order_relaxed) % 3 > 0;
    }
};

// Steps aside for as long as some rounds take, which is for nobody else to notice.
void be_aside(Program& program, size_t chance) {
    const auto call = [](void* context) {
        for (int i = 0; i < 20; ++i) dawdle();
        static_cast<std::atomic<int64_t>*>(context)->fetch_add(1, std::memory_order_relaxed);
    };
    if (chance % 4 == 0) step_aside(call, &program.asides);
}

void be_member(Program& program, int member) {
    Waiting waiting(program);
    program.expect(0 <= member && member < program.threads, "a member's number is out of range");
    for (size_t place = 0; place < program.rounds.size(); ++place) {
        if (member == program.leaver && static_cast<int>(place) == program.leaves_at) return;
        dawdle();
        if (place % 3 == 1) be_aside(program, place + member);
        const Standing expected = program.threads > 1 ? Standing::kMember : Standing::kOutside;
        program.expect(standing() == expected, "a thread does not know where it stands");
        Round& round = program.rounds[place];
        waiting.begin_round(place);
        for_each_unit(round.threads, round.units(),
                      [&, place](int64_t unit, int worker) { do_unit(program, place, unit, worker); });
        for (const int done : round.done) program.expect(done != 0, "a member goes on before all units are done");
        program.expect(!program.has_ended, "a member is inside after the caller has returned");
    }
    dawdle();
    program.expect(!program.has_ended, "a member is inside after the caller has returned");
}

struct Total {
    std::mutex mutex;
    int64_t programs = 0, units = 0, by_helpers = 0, waits = 0, asides = 0;
};

void call(int most_threads, double seconds, uint32_t seed, Total& total) {
    constexpr size_t kMostPrograms = 20'000;
    auto& programs = *new std::deque<Program>;  // they stay, for a member that comes too late
    int64_t units = 0, by_helpers = 0, waits = 0, asides = 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (programs.size() < kMostPrograms && std::chrono::steady_clock::now() < until) {
        Program& program = programs.emplace_back(seed++, most_threads);
        work_together(program.threads, [&](int member) { be_member(program, member); });
        program.has_ended = true;
        program.expect(standing() == Standing::kOutside, "the caller is still in a team");
        for (const Round& round : program.rounds) {
            program.expect(std::count(round.done.begin(), round.done.end(), 1) == round.units(), "a unit is never done");
            units += round.units();
        }
        by_helpers += program.done_by_helpers;
        waits += program.waits;
        asides += program.asides;
        dawdle();
    }
    const std::lock_guard<std::mutex> lock(total.mutex);
    total.programs += static_cast<int64_t>(programs.size());
    total.units += units;
    total.by_helpers += by_helpers;
    total.waits += waits;
    total.asides += asides;
}

}  // namespace

int main(int, char** arguments) {
    const int most_threads = std::atoi(arguments[1]), callers = std::atoi(arguments[2]);
    const double seconds = std::atof(arguments[3]);
    const auto seed = static_cast<uint32_t>(std::atoll(arguments[4]));
    Total total;
    std::vector<std::thread> threads;
    for (int i = 0; i < callers; ++i)
        threads.emplace_back([&, own = seed + 1'000'000u * i] { call(most_threads, seconds, own, total); });
    for (std::thread& thread : threads) thread.join();
    std::printf("%lld programs, %lld units, %lld of them by helpers, %lld waits, %lld times aside\n",
                static_cast<long long>(total.programs), static_cast<long long>(total.units),
                static_cast<long long>(total.by_helpers), static_cast<long long>(total.waits),
                static_cast<long long>(total.asides));
    return 0;
}
