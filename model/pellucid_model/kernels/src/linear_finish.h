// What the sums of a tile go through on their way out: bias, activation, gate, residual.
#pragma once

#include "linear_arguments.h"
#include "row_functions.h"

namespace pellucid {
namespace {

// One matrix with what follows it. A layer with a gate is two: the gate, activated, goes to `out` first.
struct Pass {
    const void* weight;
    const float* bias;
    const float* residual;
    float* out;
    int64_t outputs;
    int32_t activation;
    bool gated;  // multiply by what `out` holds
};

// Where a tile lies in the output.
struct TilePlace {
    int64_t row, rows, column, columns;
};

struct Unchanged {
    PELLUCID_INLINE F16 operator()(F16 x) const { return x; }
};

// sums [rows, stride]
template <class Activate>
void finish(const Pass& pass, const TilePlace& tile, const float* sums, int64_t stride) {
    for (int64_t r = 0; r < tile.rows; ++r, sums += stride) {
        const int64_t at = (tile.row + r) * pass.outputs + tile.column;
        for_each_vector(tile.columns, [&](int64_t i, int count) {
            F16 value = load(sums + i, count);
            if (pass.bias) value = value + load(pass.bias + tile.column + i, count);
            value = Activate()(value);
            if (pass.gated) value = load(pass.out + at + i, count) * value;
            if (pass.residual) value = load(pass.residual + at + i, count) + value;
            store(pass.out + at + i, value, count);
        });
    }
}

__attribute__((noinline)) void finish(const Pass& pass, const TilePlace& tile, const float* sums, int64_t stride) {
    switch (pass.activation) {
        case kRelu: return finish<Relu>(pass, tile, sums, stride);
        case kGelu: return finish<Gelu>(pass, tile, sums, stride);
        case kGeluTanh: return finish<GeluTanh>(pass, tile, sums, stride);
        case kSilu: return finish<Silu>(pass, tile, sums, stride);
        default: return finish<Unchanged>(pass, tile, sums, stride);
    }
}

}  // namespace
}  // namespace pellucid
