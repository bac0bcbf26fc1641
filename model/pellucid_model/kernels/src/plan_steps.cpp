// Several steps of a plan in a row: each samples a token for every sequence and is followed by one that computes it,
// without a word to Python in between. It ends early where Python has something to decide.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>

#include "plan_batch.h"
#include "sampler_row.h"

namespace pellucid {
namespace {

// Mirrors plan/native.py. S sequences, one row each.
struct Steps {
    int64_t most;            // at least 1
    int64_t vocab;           // ids that may be sampled
    int64_t stride;          // of logits
    Row* settings;           // [S], whose output_index moves on
    const int64_t* end_ids;  // sequence i ends with end_ids[end_begins[i], end_begins[i + 1])
    const int32_t* end_begins;      // [S + 1]
    const int32_t* spans;           // [S] tokens that a rolling window and its sinks hold, 0: none; or null
    double until;                   // no step begins after this moment of the monotonic clock
    int32_t descriptor;             // or when this can be read; -1: none
    const char* outgoing;           // what is written to it meanwhile
    int64_t outgoing_size;
    int32_t* sampled;               // [most, S] -> ids, -1 where there is no answer
    double* ended;                  // [most] -> when each step had sampled
    int64_t done;                   // -> steps
    int64_t written;                // -> bytes of `outgoing`: all, unless nobody reads them any more
};

double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_readable(int32_t descriptor) {
    pollfd asked{descriptor, POLLIN, 0};
    return descriptor >= 0 && poll(&asked, 1, 0) != 0;
}

// Writes what is going out, once, by whoever comes first: a reader that wakes up may take that thread's processor for as long
// as a step.
class Writing {
public:
    explicit Writing(Steps& steps) : steps_(steps) { steps.written = 0; }

    const Errand* errand() const { return steps_.outgoing_size > 0 ? &errand_ : nullptr; }

    void write_all() {
        if (is_taken_.exchange(true)) return;
        while (steps_.written < steps_.outgoing_size) {
            const auto at = steps_.outgoing + steps_.written;
            const ssize_t count = write(steps_.descriptor, at, steps_.outgoing_size - steps_.written);
            if (count < 0 && errno != EINTR) break;
            steps_.written += std::max<ssize_t>(count, 0);
        }
        is_done_ = true;
    }

    void finish() {
        write_all();
        while (!is_done_) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

private:
    Steps& steps_;
    std::atomic<bool> is_taken_{false}, is_done_{false};
    const Errand errand_{[](void* own) { static_cast<Writing*>(own)->write_all(); }, this};
};

bool ends_a_sequence(const Steps& steps, const int32_t* sampled, int64_t sequences) {
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t *first = steps.end_ids + steps.end_begins[i], *last = steps.end_ids + steps.end_begins[i + 1];
        if (sampled[i] < 0 || std::find(first, last, sampled[i]) != last) return true;
    }
    return false;
}

// Every sequence's row becomes that of the token it has sampled.
void move_on(const Batch& batch, const Steps& steps, const int32_t* sampled) {
    for (int64_t i = 0; i < batch.sequences; ++i) {
        batch.tokens[i] = sampled[i];
        const int32_t position = ++batch.positions32[i];
        batch.positions[i] = position;
        steps.settings[i].output_index++;
        if (steps.spans)
            batch.sink_query_positions[i] = steps.spans[i] > 0 ? std::min(position, steps.spans[i] - 1) : position;
    }
}

}  // namespace
}  // namespace pellucid

// The batch: one row for each sequence, each of which needs logits. Returns run_plan's status.
extern "C" int32_t pellucid_run_steps(const pellucid::Instruction* instructions, int64_t count,
                                      const pellucid::Batch* batch, pellucid::Steps* steps) {
    using namespace pellucid;
    const int64_t sequences = batch->sequences;
    Writing writing(*steps);
    int32_t status = 0;
    if (batch->threads == 1) writing.write_all();
    for (steps->done = 0; steps->done < steps->most;) {
        status = run_plan(instructions, count, *batch, steps->done == 0 ? writing.errand() : nullptr);
        if (status != 0) break;
        int32_t* sampled = steps->sampled + steps->done * sequences;
        pellucid_sample(batch->logits, sequences, steps->stride, steps->vocab, steps->settings, nullptr, batch->threads,
                        sampled);
        const double now = monotonic_seconds();
        steps->ended[steps->done++] = now;
        writing.write_all();  // if that thread came too late
        if (now >= steps->until || ends_a_sequence(*steps, sampled, sequences)) break;
        if (is_readable(steps->descriptor)) break;
        move_on(*batch, *steps, sampled);
    }
    writing.finish();
    return status;
}
