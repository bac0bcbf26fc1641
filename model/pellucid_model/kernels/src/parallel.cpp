// A team of threads in which hardly anybody waits for one that does nothing.
//
// Every member begins with its own share of a call's units, always the same part of them, so that what it wrote in one
// call is in its cache in the next; then it takes what is left of the others' shares. So a thread that the system has put
// aside, because something else runs on its core, costs nothing, unless it is in the middle of a unit, or a round is for
// fewer threads than the team has and all that are to work on it are away. A barrier, as at the end of an OpenMP region,
// waits for every thread, and on busy cores that is a wait of whole scheduler slices.
//
// Calls are counted: a call's number is its round, the same for all members. A share has two words, each with the last
// round that somebody worked on it in the upper half: `claimed`, whose lower half is the next unit, and `done`, whose
// lower half is how many units are. Claiming is a compare-and-swap of both halves, so a member that is late finds that the
// share is in a later round and takes nothing. A round is over when every share has all its units done, or is in a later
// round. In the ordinary case, where all end at about the same time, a member learns that from one line of each other.
//
// Those who enter a job say so before they look whether it is still open, and the caller closes it before it looks who is
// inside: it never waits for one that comes later. Members that have waited for a while step out, let others have the
// core, and come in again.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace pellucid {
namespace {

using Call = void (*)(void*, int);
using UnitCall = void (*)(void*, int64_t, int);
using WaitCall = bool (*)(void*);

constexpr int kMostThreads = 256;

constexpr uint32_t round_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
constexpr int64_t number_of(uint64_t word) { return static_cast<uint32_t>(word); }
constexpr uint64_t word_of(uint32_t round, int64_t number) { return uint64_t{round} << 32 | static_cast<uint64_t>(number); }

// Steps follow each other within microseconds. Looking out for the next one is cheaper than sleeping, but only for so
// long, and never without letting others have the core.
constexpr std::chrono::microseconds kLookOut{200};
constexpr int kSpins = 64;  // between two times of letting others have it

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A share of the units of the round that is going on. Two lines: others look at `done` all the time.
struct Share {
    alignas(64) std::atomic<uint64_t> claimed{0};
    alignas(64) std::atomic<uint64_t> done{0};

    bool is_over(uint32_t round, int64_t units) const {
        const uint64_t word = done.load(std::memory_order_acquire);
        return round_of(word) > round || (round_of(word) == round && number_of(word) == units);
    }

    // Calls call(unit) for units of [begin, end) until all are claimed.
    template <class UnitOfShare>
    void drain(uint32_t round, int64_t begin, int64_t end, const UnitOfShare& call) {
        int64_t own = 0;
        uint64_t word = claimed.load(std::memory_order_acquire);
        while (round_of(word) <= round) {
            const int64_t unit = round_of(word) == round ? number_of(word) : begin;
            if (unit == end) break;
            if (!claimed.compare_exchange_weak(word, word_of(round, unit + 1), std::memory_order_acq_rel)) continue;
            call(unit);
            ++own;
            word = claimed.load(std::memory_order_acquire);
        }
        if (own == end - begin)  // nobody else writes it then
            done.store(word_of(round, own), std::memory_order_release);
        else if (own > 0)
            add_done(round, own);
    }

    void add_done(uint32_t round, int64_t units) {
        uint64_t word = done.load(std::memory_order_relaxed), sum;
        do
            sum = word_of(round, units + (round_of(word) == round ? number_of(word) : 0));
        while (!done.compare_exchange_weak(word, sum, std::memory_order_acq_rel));
    }
};

struct TooLate {};  // thrown where a member finds that the job has ended without it

class Pool;

// This thread's part in a job.
struct Membership {
    Standing standing = Standing::kOutside;
    Pool* pool = nullptr;
    int threads = 0, member = 0;
    uint32_t job = 0, round = 0;
    WaitCall while_waiting = nullptr;
    void* waiting_context = nullptr;

    void wait_a_little() const {
        if (!while_waiting || !while_waiting(waiting_context)) relax();
    }
};

thread_local Membership own;

class Pool {
public:
    void run(int threads, Call call, void* context) {
        const std::lock_guard<std::mutex> one_job_at_a_time(mutex_);
        threads = std::min(threads, kMostThreads);
        hire(threads - 1);
        for (int i = 0; i < threads; ++i) {
            shares_[i].claimed.store(0, std::memory_order_relaxed);
            shares_[i].done.store(0, std::memory_order_relaxed);
        }
        threads_.store(threads, std::memory_order_relaxed);
        call_.store(call, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        job_.store(++last_job_, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) job_.notify_all();
        own = {Standing::kMember, this, threads, 0, last_job_, 0};
        call(context, 0);
        own = {};
        job_.store(++last_job_, std::memory_order_seq_cst);
        for (int helper = 1; helper <= helpers_; ++helper)
            for (int spins = 1; inside_[helper].is.load(std::memory_order_seq_cst); ++spins)
                spins % kSpins == 0 ? std::this_thread::yield() : relax();
    }

    void share(int threads, int64_t units, UnitCall call, void* context) {
        threads = std::min(threads, own.threads);
        const int member = own.member;
        const uint32_t round = ++own.round;
        const auto begin = [&](int owner) { return first_unit(owner, units, threads); };
        const auto is_over = [&](int owner) {
            const int64_t size = begin(owner + 1) - begin(owner);
            return size == 0 || shares_[owner].is_over(round, size);
        };
        const auto drain = [&](int owner) {
            own.standing = Standing::kInUnit;
            shares_[owner].drain(round, begin(owner), begin(owner + 1),
                                 [&](int64_t unit) { call(context, unit, member); });
            own.standing = Standing::kMember;
        };
        for (int i = 0; i < threads && member < threads; ++i) {
            const int owner = (member + i) % threads;
            for (int spins = 0; i > 0 && spins < kSpinsBeforeHelp && !is_over(owner); ++spins) own.wait_a_little();
            if (!is_over(owner)) drain(owner);
        }
        for (int owner = 0; owner < threads; ++owner)
            for (int spins = 1; !is_over(owner); ++spins)
                spins % kSpins == 0 ? step_out(std::this_thread::yield) : own.wait_a_little();
    }

    // Steps out of the job for as long as body() takes.
    template <class Body>
    void step_out(const Body& body) {
        if (own.member > 0) leave(own.member);
        body();
        if (own.member > 0 && !enter(own.member, own.job)) throw TooLate();
    }

private:
    // Who is about to end needs no help, and to ask for its units takes them out of its cache.
    static constexpr int kSpinsBeforeHelp = 4;

    // As many helpers as the system grants: whoever is there takes the others' shares too.
    void hire(int helpers) {
        try {
            for (; helpers_ < helpers; ++helpers_)
                std::thread([this, helper = helpers_ + 1] { help(helper); }).detach();
        } catch (const std::system_error&) {
        }
    }

    [[noreturn]] void help(int helper) {
        for (uint32_t job = 0;;) {
            job = next_job(job);
            if (!enter(helper, job)) continue;
            try {
                if (const int threads = threads_.load(std::memory_order_relaxed); helper < threads) {
                    own = {Standing::kMember, this, threads, helper, job, 0};
                    call_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), helper);
                }
                leave(helper);
            } catch (const TooLate&) {
            }
            own = {};
        }
    }

    bool enter(int helper, uint32_t job) {
        inside_[helper].is.store(true, std::memory_order_seq_cst);
        if (job_.load(std::memory_order_seq_cst) == job) return true;
        leave(helper);
        return false;
    }

    void leave(int helper) { inside_[helper].is.store(false, std::memory_order_release); }

    // Waits for an open job other than `seen`.
    uint32_t next_job(uint32_t seen) {
        const auto until = std::chrono::steady_clock::now() + kLookOut;
        for (int spins = 1;; ++spins) {
            const uint32_t now = job_.load(std::memory_order_acquire);
            if (now != seen && is_open(now)) return now;
            if (spins % kSpins != 0) {
                relax();
            } else if (std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            } else {
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                job_.wait(now, std::memory_order_seq_cst);
                sleepers_.fetch_sub(1, std::memory_order_relaxed);
            }
        }
    }

    static bool is_open(uint32_t job) { return job % 2 == 1; }

    struct alignas(64) Inside {
        std::atomic<bool> is{false};
    };

    std::mutex mutex_;
    int helpers_ = 0;  // threads besides callers
    uint32_t last_job_ = 0;
    alignas(64) std::atomic<uint32_t> job_{0};  // odd: open; even: the one before it has been closed
    std::atomic<int> threads_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    alignas(64) std::atomic<int> sleepers_{0};
    Share shares_[kMostThreads];
    Inside inside_[kMostThreads];
};

}  // namespace

void run_team(int threads, Call call, void* context) {
    static Pool& pool = *new Pool;  // never destroyed: its threads run until the process ends
    pool.run(threads, call, context);
}

Standing standing() { return own.standing; }

void step_aside(void (*call)(void*), void* context) {
    own.standing == Standing::kMember ? own.pool->step_out([=] { call(context); }) : call(context);
}

void while_waiting(WaitCall call, void* context) {
    own.while_waiting = call;
    own.waiting_context = context;
}

void share_units(int threads, int64_t units, UnitCall call, void* context) {
    own.pool->share(threads, units, call, context);
}

}  // namespace pellucid
