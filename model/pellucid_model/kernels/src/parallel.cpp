// A pool of threads that nobody waits for.
//
// The caller works too, and at the end it waits only for units that another thread has claimed and not yet finished: a
// thread that the system has put aside, because something else runs on its core, costs nothing. A barrier, as at the end
// of an OpenMP region, waits for every thread, and on busy cores that is a wait of whole scheduler slices.
//
// Every worker begins with its own share of a job's units, always the same part of them, so that what it wrote in one
// job is in its cache in the next; then it takes what is left of the others' shares. Units of a share are claimed from
// one number, its ticket: the job's generation in the upper half, the next unit in the lower half. Claiming is a
// compare-and-swap of both, so that a thread which comes late, with an old job's description in its hands, cannot claim
// a unit of a new one.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace pellucid {
namespace {

using Call = void (*)(void*, int64_t, int);

constexpr uint64_t kUnit = 0xffffffff;  // the lower half; all ones: closed, nothing to claim
constexpr int kMostThreads = 256;
constexpr uint32_t generation_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

// Operators of one step follow each other within microseconds. Looking out for the next one is cheaper than sleeping,
// but only for so long, and never without letting others have the core.
constexpr std::chrono::microseconds kLookOut{200};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
public:
    void run(int threads, int64_t units, Call call, void* context) {
        const std::lock_guard<std::mutex> one_job_at_a_time(mutex_);
        threads = std::min(threads, kMostThreads);
        hire(threads - 1);
        publish(threads, units, call, context);
        drain(generation_, 0);
        for (int spins = 0; done_.load(std::memory_order_acquire) < units; ++spins)
            spins % 64 == 63 ? std::this_thread::yield() : relax();
    }

private:
    // As many helpers as the system grants: whoever is there takes the others' shares too.
    void hire(int helpers) {
        try {
            for (; helpers_ < helpers; ++helpers_)
                std::thread([this, worker = helpers_ + 1] { help(worker); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void publish(int threads, int64_t units, Call call, void* context) {
        ++generation_;
        for (int worker = 0; worker < threads; ++worker)
            shares_[worker].ticket.store(uint64_t{generation_} << 32 | kUnit, std::memory_order_relaxed);
        // Whoever sees a new description below also sees that the old tickets are closed.
        std::atomic_thread_fence(std::memory_order_release);
        threads_.store(threads, std::memory_order_relaxed);
        units_.store(units, std::memory_order_relaxed);
        call_.store(call, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        for (int worker = 0; worker < threads; ++worker)
            shares_[worker].ticket.store(uint64_t{generation_} << 32 | static_cast<uint64_t>(first_unit(worker, units, threads)),
                                         std::memory_order_release);
        published_.store(generation_, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) published_.notify_all();
    }

    // Claims and runs units of the job `generation` until there are none.
    void drain(uint32_t generation, int worker) {
        const int threads = threads_.load(std::memory_order_relaxed);
        const int64_t units = units_.load(std::memory_order_relaxed);
        const Call call = call_.load(std::memory_order_relaxed);
        void* const context = context_.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (worker >= threads) return;
        int64_t done = 0;
        for (int i = 0; i < threads; ++i) {
            const int owner = (worker + i) % threads;
            const auto end = static_cast<uint64_t>(first_unit(owner + 1, units, threads));
            std::atomic<uint64_t>& shared = shares_[owner].ticket;
            uint64_t ticket = shared.load(std::memory_order_acquire);
            while (generation_of(ticket) == generation && (ticket & kUnit) < end) {
                if (!shared.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
                call(context, static_cast<int64_t>(ticket & kUnit), worker);
                ++done;
                ticket = shared.load(std::memory_order_acquire);
            }
        }
        if (done > 0) done_.fetch_add(done, std::memory_order_release);
    }

    [[noreturn]] void help(int worker) {
        for (uint32_t seen = 0;;) {
            seen = next_generation(seen);
            drain(seen, worker);
        }
    }

    // Waits for a job other than `seen`.
    uint32_t next_generation(uint32_t seen) {
        const auto until = std::chrono::steady_clock::now() + kLookOut;
        for (int spins = 0;; ++spins) {
            const uint32_t now = published_.load(std::memory_order_acquire);
            if (now != seen) return now;
            if (spins % 64 != 63) {
                relax();
            } else if (std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            } else {
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                published_.wait(seen, std::memory_order_seq_cst);
                sleepers_.fetch_sub(1, std::memory_order_relaxed);
            }
        }
    }

    struct alignas(64) Share {
        std::atomic<uint64_t> ticket{kUnit};
    };

    Share shares_[kMostThreads];
    std::mutex mutex_;
    int helpers_ = 0;  // threads besides callers
    uint32_t generation_ = 0;
    std::atomic<uint32_t> published_{0};  // generation of the newest job
    std::atomic<int> sleepers_{0};
    std::atomic<int> threads_{0};
    std::atomic<int64_t> units_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace

void run_units(int threads, int64_t units, Call call, void* context) {
    static Pool& pool = *new Pool;  // never destroyed: its threads run until the process ends
    pool.run(threads, units, call, context);
}

}  // namespace pellucid
