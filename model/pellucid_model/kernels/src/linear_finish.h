// What the sums of a tile go through on their way out: bias, gate, activation, residual. See linear_arguments.h.
#pragma once

#include "linear_arguments.h"
#include "row_functions.h"

namespace pellucid {
namespace {

// Where a tile lies in a layer's output.
struct TilePlace {
    int64_t row, rows, column, columns;
};

struct Unchanged {
    PELLUCID_INLINE F16 operator()(F16 x) const { return x; }
};

// sums, gates [rows, stride]; gates null where the layer has none.
template <class Activate>
void finish(const LinearLayer& layer, const TilePlace& tile, const float* sums, const float* gates, int64_t stride) {
    const auto with_bias = [&](const float* from, const float* bias, int64_t i, int count) {
        const F16 value = load(from + i, count);
        return bias ? value + load(bias + tile.column + i, count) : value;
    };
    for (int64_t r = 0; r < tile.rows; ++r, sums += stride) {
        const int64_t at = (tile.row + r) * layer.outputs + tile.column;
        for_each_vector(tile.columns, [&](int64_t i, int count) {
            F16 value = with_bias(sums, layer.bias, i, count);
            if (gates)
                value = Activate()(with_bias(gates + r * stride, layer.gate_bias, i, count)) * value;
            else
                value = Activate()(value);
            if (layer.residual) value = load(layer.residual + at + i, count) + value;
            store(layer.out + at + i, value, count);
        });
    }
}

__attribute__((noinline)) void finish(const LinearLayer& layer, const TilePlace& tile, const float* sums,
                                      const float* gates, int64_t stride) {
    switch (layer.activation) {
        case kRelu: return finish<Relu>(layer, tile, sums, gates, stride);
        case kGelu: return finish<Gelu>(layer, tile, sums, gates, stride);
        case kGeluTanh: return finish<GeluTanh>(layer, tile, sums, gates, stride);
        case kSilu: return finish<Silu>(layer, tile, sums, gates, stride);
        default: return finish<Unchanged>(layer, tile, sums, gates, stride);
    }
}

}  // namespace
}  // namespace pellucid
