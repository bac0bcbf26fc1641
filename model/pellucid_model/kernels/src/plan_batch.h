// What one step of a plan is given: its rows, where their numbers lie, and the memory it computes in.
#pragma once

#include <cstdint>

namespace pellucid {

struct Angles {
    const float *cos, *sin;
    int64_t positions;
};

// Mirrors plan/native.py. Types and meanings as in `paged_attention`.
struct Batch {
    int64_t rows[2];  // of each phase
    float* arena[2];
    float* logits;
    int64_t *tokens, *positions;  // these, positions32 and sink_query_positions move on from step to step
    const int64_t* sampled_rows;
    int32_t* positions32;
    const int32_t *row_sequence, *block_tables;
    const int32_t* const* windows;
    const int32_t* sinks;
    int32_t* sink_query_positions;
    const Angles* angles;
    int64_t sequences, table_width;
    int32_t threads;
};

struct Instruction;

// Something that the last of several threads does while the others begin with a step, if it comes in time; maybe longer.
struct Errand {
    void (*call)(void*);
    void* context;
};

// Returns kBeyondTable or the attention's Status; anything but kOk stops the step there. errand: or null.
int32_t run_plan(const Instruction* instructions, int64_t count, const Batch& batch, const Errand* errand);

}  // namespace pellucid
