// Runs a whole step: the instructions of a recorded program (plan/program.py), one after the other, over row buffers.
//
// The threads are a team (parallel.h): each runs all instructions, for itself where they only prepare, and shares the
// operators' units with the others. So they need not be called together and told what to do for every operator.
// Instructions that are too small to be shared are one unit, as many as follow each other.
#include <atomic>

#include "amx.h"
#include "plan_step.h"
#include "scratch.h"

extern "C" int64_t pellucid_count_partials(const void* arguments);

namespace pellucid {
namespace {

// Whether two attentions share their work out alike: most models have one kind or two.
bool is_alike(const Instruction& i, const Instruction& j) {
    const auto *a = static_cast<const Arguments*>(i.first), *b = static_cast<const Arguments*>(j.first);
    return i.window == j.window && i.other == j.other && i.rotary == j.rotary && i.out.phase == j.out.phase &&
           a->query_heads == b->query_heads && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim;
}

// Finds out how much memory the threads share, and whether attention's arguments are in range.
int32_t find_shared(const Batch& batch, const Instruction* begin, const Instruction* end, Shared& shared) {
    const Step step(batch, end, shared, 0);
    int64_t bytes = 0, partials = 0;
    const Instruction* last = nullptr;
    for (const Instruction* i = begin; i < end; ++i) {
        if (i->kind == kLinear) bytes = std::max(bytes, prepared_bytes(step.linear_arguments(*i)));
        if (i->kind != kAttention || (last && is_alike(*i, *last))) continue;
        const Arguments arguments = step.attention_arguments(*i);
        const int64_t count = pellucid_count_partials(&arguments);
        if (count < 0) return static_cast<int32_t>(-count);
        partials = std::max(partials, count);
        last = i;
    }
    shared.prepared = scratch<std::byte, kPreparedRows>(bytes);
    shared.partials = scratch<float, kAttentionPartials>(partials);
    return kOk;
}

// Runs [begin, end) as a member of the team, until one fails.
void run_instructions(Step& step, const Instruction* begin, const Instruction* end, std::atomic<int32_t>& status) {
    const auto run = [&](const Instruction& i) {
        const int32_t own = step.run(i);
        if (own != kOk) status = own;
        return own == kOk;
    };
    const auto is_small = [&](const Instruction& i) { return step.work(i) < 2 * kWorkPerMember; };
    while (begin < end && status.load(std::memory_order_relaxed) == kOk) {
        const Instruction* const small = begin;
        while (begin < end && is_small(*begin)) ++begin;
        if (begin > small)
            for_each_unit(1, 1, [&](int64_t, int) { std::all_of(small, begin, run); });
        else if (!run(*begin++))
            return;
    }
}

}  // namespace

int32_t run_plan(const Instruction* instructions, int64_t count, const Batch& batch, const Errand* errand) {
    const Instruction* const end = instructions + count;
    Shared shared;
    if (const int32_t unfit = find_shared(batch, instructions, end, shared); unfit != kOk) return unfit;
    work_together(batch.threads, [&](int member) {
        if (errand && member > 0 && member == batch.threads - 1) step_aside(errand->call, errand->context);
        const UsingTiles<> matrix_unit;  // once for all operators
        Step step(batch, end, shared, member);
        run_instructions(step, instructions, end, shared.status);
        while_waiting(nullptr, nullptr);
    });
    return shared.status;
}

}  // namespace pellucid

extern "C" int32_t pellucid_run_plan(const pellucid::Instruction* instructions, int64_t count,
                                     const pellucid::Batch* batch) {
    return pellucid::run_plan(instructions, count, *batch, nullptr);
}
