// The instructions of a recorded program (plan/program.py).
//
// A buffer lies in the arena of its phase: `tokens` has a row for every token of the step, `sampled` one for every row
// that needs logits. Arenas are laid out in numbers per row, so that a buffer begins at start * rows.
#pragma once

#include <cstdint>

namespace pellucid {

// Mirrors plan/instructions.py.
enum Kind : int32_t {
    kGather, kSelect, kCopy, kRearrange, kCombine, kReduce, kLinear, kNormalize, kActivate, kAttention
};
enum Arithmetic : int32_t { kAdd, kSubtract, kMultiply, kDivide, kMaximum, kMinimum };
enum Reduction : int32_t { kSum, kLargest };
enum Second : int32_t { kRows, kSameForAllRows, kNumber };

struct Place {
    int64_t start;   // of the buffer, in numbers per row; -1: the caller's logits
    int64_t stride;  // numbers per row of the buffer
    int64_t offset, width;
    int64_t phase;           // 0 tokens, 1 sampled
    int64_t rounded_stride;  // of rows of bfloat16 (linear_arguments.h), which begin where the buffer does; 0: float32
};

struct Instruction {
    Place a, b, c, out;
    const void* call;    // of activations
    const void* first;   // weight, table, constant, or what is fixed of an operator's arguments
    const void* second;  // bias, or the LayerPlaces of a linear layer
    int64_t size;        // numbers of a norm or a reduction; rows of a table
    float number;        // epsilon, the number to combine with, or to fill with
    Kind kind;
    int32_t variant;  // Arithmetic, Reduction, Norm; for a gather 1: by position; for attention 1: with keys and values
    int32_t other;    // Second, TableFormat; for attention 1: sinks stay visible
    int32_t window, rotary;  // indices into Batch, rotary -1: none
};

struct LayerPlaces {
    Place out, residual;  // residual: width 0 where there is none
};

}  // namespace pellucid
