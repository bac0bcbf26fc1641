// What a row is sampled by.
#pragma once

#include <cstdint>

namespace pellucid {

// Settings of one row, as packed by pellucid_server/engine/sampler.py. Lists may hold ids beyond the vocabulary.
struct Row {
    double temperature;
    double top_p;
    double min_p;
    double typical_p;
    double repetition_penalty;
    double presence_penalty;
    double frequency_penalty;
    uint64_t seed;
    const int32_t* bias_ids;  // [bias_count], each once
    const double* biases;
    const int32_t* allowed_ids;    // [allowed_count]; none: all are allowed
    const int32_t* seen_ids;       // [seen_count], the sequence's distinct ids
    const int32_t* output_counts;  // [seen_count], how often each is in the output
    const uint32_t* permitted;     // bit i of the words: id i may follow; null: every id
    uint32_t bias_count;
    uint32_t allowed_count;
    uint32_t seen_count;
    uint32_t banned_begin;  // its banned ids are banned_ids[banned_begin, banned_end)
    uint32_t banned_end;
    uint32_t top_k;
    uint32_t sequence_index;
    uint32_t output_index;

    bool penalizes() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
    bool changes_logits() const {
        return bias_count || allowed_count || permitted || banned_begin < banned_end || (seen_count && penalizes());
    }
};
static_assert(sizeof(Row) == 144);

}  // namespace pellucid

// logits      [rows][stride], of which ids 0 … vocab - 1 may be chosen
// settings    [rows]
// banned_ids  see Row
// threads     at most so many, at least 1; no result depends on it
// out         [rows], ids, -1 where there is no answer
extern "C" void pellucid_sample(const float* logits, int64_t rows, int64_t stride, int64_t vocab,
                                const pellucid::Row* settings, const int32_t* banned_ids, int threads, int32_t* out);
