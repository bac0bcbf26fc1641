// What the instructions of a plan do in one step. The operators are those that Python calls one by one, and so are their
// results.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>

#include "attention_cache.h"
#include "cache_reading.h"
#include "linear_arguments.h"
#include "parallel.h"
#include "plan_batch.h"
#include "plan_instructions.h"
#include "tables.h"

extern "C" {
int32_t pellucid_paged_attention(const void* arguments);
void pellucid_fused_linear(const pellucid::LinearArguments* arguments);
void pellucid_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t size, float eps,
                       int threads);
void pellucid_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t size,
                         float eps, int threads);
}

namespace pellucid {
namespace {

using ActivateCall = void (*)(const float* x, float* out, int64_t size, int threads);

constexpr int32_t kBeyondTable = -1;  // beside the attention's Status
constexpr int kMostLayers = 16;       // as in plan/fusion.py

// What the threads of a step share, besides its buffers.
struct Shared {
    std::byte* prepared = nullptr;
    float* partials = nullptr;
    std::atomic<int32_t> status{kOk};  // of an instruction that failed
};

// A thread's way through a step.
class Step {
public:
    Step(const Batch& batch, const Instruction* end, Shared& shared, int member)
        : batch_(batch), end_(end), shared_(shared), member_(member) {
        for (int64_t row = 0; row < batch.rows[0]; ++row) keys_ += batch.positions32[row] + 1;
    }

    // Multiply-adds of an instruction, or things as costly; about, and rather more than less.
    int64_t work(const Instruction& i) const {
        const int64_t numbers = batch_.rows[i.out.phase] * i.out.width;
        switch (i.kind) {
            case kLinear: {
                const auto& arguments = *static_cast<const LinearArguments*>(i.first);
                int64_t outputs = 0;
                for (int64_t n = 0; n < arguments.layer_count; ++n)
                    outputs += arguments.layers[n].outputs * (arguments.layers[n].gate_weight ? 2 : 1);
                return batch_.rows[i.a.phase] * arguments.inputs * outputs;
            }
            case kAttention: return 4 * keys_ * i.out.width;
            case kReduce: return 8 * numbers * i.size;
            case kActivate: return numbers * 8;
            default: return numbers;
        }
    }

    // A linear layer's arguments, but for what it reads and writes.
    LinearArguments linear_arguments(const Instruction& i) const {
        LinearArguments arguments = *static_cast<const LinearArguments*>(i.first);
        arguments.rows = batch_.rows[i.a.phase];
        arguments.is_rounded = i.a.rounded_stride > 0;
        arguments.threads = batch_.threads;
        arguments.prepared = shared_.prepared;
        return arguments;
    }

    Arguments attention_arguments(const Instruction& i) const {
        Arguments a = *static_cast<const Arguments*>(i.first);
        a.q = at(i.a, 0);
        a.k = i.variant ? at(i.b, 0) : nullptr;
        a.v = i.variant ? at(i.c, 0) : nullptr;
        a.out = at(i.out, 0);
        a.q_stride = i.a.stride;
        a.k_stride = i.b.stride;
        a.v_stride = i.c.stride;
        a.rounded_stride = i.out.rounded_stride;
        a.rows = batch_.rows[i.out.phase];
        a.row_sequence = batch_.row_sequence;
        a.positions = batch_.positions32;
        a.block_tables = batch_.block_tables;
        a.sequences = batch_.sequences;
        a.table_width = batch_.table_width;
        a.window = batch_.windows[i.window];
        if (i.other) {
            a.sinks = batch_.sinks;
            a.sink_query_positions = batch_.sink_query_positions;
        }
        if (i.rotary >= 0) {
            a.cos = batch_.angles[i.rotary].cos;
            a.sin = batch_.angles[i.rotary].sin;
            a.rotary_positions = batch_.angles[i.rotary].positions;
        }
        a.threads = batch_.threads;
        a.partials = shared_.partials;
        a.status = &shared_.status;
        return a;
    }

    int32_t run(const Instruction& i) {
        const int64_t rows = batch_.rows[i.out.phase];
        switch (i.kind) {
            case kGather: return gather(i, rows);
            case kSelect:
                each_row(rows, i.out.width, [&](int64_t row) { copy(at(i.a, batch_.sampled_rows[row]), i.out, row); });
                break;
            case kCopy:
                each_row(rows, i.out.width, [&](int64_t row) { copy(at(i.a, row), i.out, row); });
                break;
            case kRearrange: rearrange(i, rows); break;
            case kCombine: combine(i, rows); break;
            case kReduce: reduce(i, rows); break;
            case kLinear: linear(i); break;
            case kNormalize: normalize(i, rows); break;
            case kActivate: activate(i, rows); break;
            case kAttention: return attention(i);
        }
        return kOk;
    }

private:
    float* at(const Place& place, int64_t row) const {
        float* buffer =
            place.start < 0 ? batch_.logits : batch_.arena[place.phase] + place.start * batch_.rows[place.phase];
        return buffer + row * place.stride + place.offset;
    }

    void copy(const float* from, const Place& out, int64_t row) const {
        std::memcpy(at(out, row), from, out.width * sizeof(float));
    }

    template <class Body>
    void each_row(int64_t rows, int64_t work, const Body& body) const {
        for_each_row(batch_.threads, rows, work, body);
    }

    int32_t gather(const Instruction& i, int64_t rows) const {
        const int64_t* index = i.variant ? batch_.positions : batch_.tokens;
        for (int64_t row = 0; row < rows; ++row)
            if (index[row] < 0 || index[row] >= i.size) return kBeyondTable;
        each_row(rows, i.out.width,
                 [&](int64_t row) { look_up_row(i.first, i.other, index[row], at(i.out, row), i.out.width); });
        return kOk;
    }

    void rearrange(const Instruction& i, int64_t rows) const {
        const auto* columns = static_cast<const int32_t*>(i.first);
        each_row(rows, i.out.width, [&](int64_t row) {
            const float* x = at(i.a, row);
            float* out = at(i.out, row);
            for (int64_t j = 0; j < i.out.width; ++j) out[j] = columns[j] < 0 ? i.number : x[columns[j]];
        });
    }

    void reduce(const Instruction& i, int64_t rows) const {
        each_row(rows, 8 * i.a.width, [&](int64_t row) {
            const float* x = at(i.a, row);
            float* out = at(i.out, row);
            for (int64_t j = 0; j < i.out.width; ++j, x += i.size)
                out[j] = i.variant == kSum ? row_sum(x, i.size) : row_max(x, i.size);
        });
    }

    void combine(const Instruction& i, int64_t rows) const {
        switch (i.variant) {
            case kAdd: return combine(i, rows, [](F16 a, F16 b) { return a + b; });
            case kSubtract: return combine(i, rows, [](F16 a, F16 b) { return a - b; });
            case kMultiply: return combine(i, rows, [](F16 a, F16 b) { return a * b; });
            case kDivide: return combine(i, rows, [](F16 a, F16 b) { return a / b; });
            case kMaximum: return combine(i, rows, [](F16 a, F16 b) { return max(b, a); });
            case kMinimum: return combine(i, rows, [](F16 a, F16 b) { return min(b, a); });
        }
    }

    template <class Function>
    void combine(const Instruction& i, int64_t rows, const Function& function) const {
        const F16 number = broadcast(i.number);
        each_row(rows, i.out.width, [&](int64_t row) {
            const float* a = at(i.a, row);
            const float* b = i.other == kRows ? at(i.b, row) : static_cast<const float*>(i.first);
            float* out = at(i.out, row);
            if (i.other == kNumber)
                combine(a, a, out, i.out.width, [&](F16 x, F16) { return function(x, number); });
            else
                combine(a, b, out, i.out.width, function);
        });
    }

    template <class Function>
    static void combine(const float* a, const float* b, float* out, int64_t width, const Function& function) {
        for (int64_t j = 0; j < width; j += 16) {
            const int count = static_cast<int>(std::min<int64_t>(16, width - j));
            store(out + j, function(load(a + j, count), load(b + j, count)), count);
        }
    }

    void linear(const Instruction& i) {
        LinearArguments arguments = linear_arguments(i), next;
        const auto* places = static_cast<const LayerPlaces*>(i.second);
        LinearLayer layers[kMostLayers];
        for (int64_t n = 0; n < arguments.layer_count; ++n) {
            layers[n] = arguments.layers[n];
            layers[n].out = at(places[n].out, 0);
            layers[n].rounded_stride = places[n].out.rounded_stride;
            layers[n].residual = places[n].residual.width ? at(places[n].residual, 0) : nullptr;
        }
        arguments.x = at(i.a, 0);
        arguments.layers = layers;
        arguments.reading = reading_before(&i);
        const Instruction* following = &i + 1;
        while (following < end_ && following->kind != kLinear) ++following;
        if (following < end_) {
            next = linear_arguments(*following);
            arguments.next = &next;
        }
        begin_waiting(following);
        pellucid_fused_linear(&arguments);
    }

    // From now on this thread waits for the linear layer `next`.
    void begin_waiting(const Instruction* next) {
        waiting_for_ = next < end_ ? next : nullptr;
        fetched_ = -1;
        while_waiting([](void* step) { return static_cast<Step*>(step)->fetch_weights(); }, this);
    }

    // Prefetches a little of what that begins with: of few rows memory has nothing else to do meanwhile.
    bool fetch_weights() {
        if (!waiting_for_ || fetched_ >= kFetchedBytes) return false;
        if (fetched_ < 0) {
            weights_ = first_weights(linear_arguments(*waiting_for_), member_);
            fetched_ = weights_.first ? 0 : kFetchedBytes;
            return true;
        }
        for (const int64_t end = fetched_ + 128; fetched_ < end; fetched_ += 64) {
            prefetch_to_l2(weights_.first + fetched_);
            prefetch_to_l2(weights_.second + fetched_);
        }
        return true;
    }

    void normalize(const Instruction& i, int64_t rows) const {
        const int64_t count = i.out.width / i.size;
        const auto call = [&](const float* x, float* out, int64_t times, int threads) {
            const auto *weight = static_cast<const float*>(i.first), *bias = static_cast<const float*>(i.second);
            if (i.variant == kRmsNorm)
                pellucid_rms_norm(x, weight, out, times, i.size, i.number, threads);
            else
                pellucid_layer_norm(x, weight, bias, out, times, i.size, i.number, threads);
        };
        if (i.a.width == i.a.stride && i.out.width == i.out.stride)
            return call(at(i.a, 0), at(i.out, 0), rows * count, batch_.threads);
        each_row(rows, i.out.width, [&](int64_t row) { call(at(i.a, row), at(i.out, row), count, 1); });
    }

    void activate(const Instruction& i, int64_t rows) const {
        const auto call = reinterpret_cast<ActivateCall>(reinterpret_cast<intptr_t>(i.call));
        each_row(rows, 8 * i.out.width, [&](int64_t row) { call(at(i.a, row), at(i.out, row), i.out.width, 1); });
    }

    // What this thread is going to read of the cache in the attention that comes next; null where that is not worth
    // fetching beforehand: of few rows the weights take memory all its time, and of long contexts little would be kept.
    CacheReading* reading_before(const Instruction* i) {
        if (batch_.rows[0] != batch_.sequences || batch_.rows[0] < kRowsForReading) return nullptr;
        while (i < end_ && i->kind != kAttention) ++i;
        if (i != reading_for_) {
            reading_for_ = i;
            reading_.reset();
            if (i < end_) begin_reading(attention_arguments(*i));
        }
        return reading_ ? &*reading_ : nullptr;
    }

    void begin_reading(const Arguments& a) {
        switch (a.cache_format) {
            case kFloat32Cache: return begin_reading<Float32Format>(a);
            case kBfloat16Cache: return begin_reading<Bfloat16Format>(a);
            case kInt8Cache: return begin_reading<Int8Cache>(a);
        }
    }

    template <class Format>
    void begin_reading(const Arguments& a) {
        constexpr int64_t kNumber = sizeof(typename Format::Number);
        const HeadLayout<Format> layout(a.head_dim, a.block_size);
        const CachedRows rows{static_cast<const std::byte*>(a.k_cache),
                              static_cast<const std::byte*>(a.v_cache),
                              a.block_stride * kNumber,
                              layout.stride * kNumber,
                              a.kv_heads,
                              a.block_size,
                              layout.granule,
                              a.positions,
                              a.row_sequence,
                              a.block_tables,
                              a.window,
                              a.table_width,
                              first_unit(member_, a.rows, a.threads),
                              first_unit(member_ + 1, a.rows, a.threads)};
        if (rows.bytes() <= kMostReadBytes) reading_.emplace(rows);
    }

    int32_t attention(const Instruction& i) const {
        const Arguments a = attention_arguments(i);
        return pellucid_paged_attention(&a);
    }

    static constexpr int64_t kRowsForReading = 17;
    static constexpr int64_t kMostReadBytes = 4 << 20;
    static constexpr int64_t kFetchedBytes = 8 << 10;  // in each place

    const Batch& batch_;
    const Instruction* const end_;
    Shared& shared_;
    const int member_;
    int64_t keys_ = 0;  // that all rows see, if they see all before them
    const Instruction* reading_for_ = nullptr;  // the attention that `reading_` is of
    std::optional<CacheReading> reading_;
    const Instruction* waiting_for_ = nullptr;  // a linear layer
    FirstWeights weights_;                      // of that one; once fetched_ is not negative
    int64_t fetched_ = -1;
};

}  // namespace
}  // namespace pellucid
