// What the sums of a tile go through on their way out: bias, activation, gate, residual.
#pragma once

#include "linear_arguments.h"
#include "linear_formats.h"
#include "row_functions.h"

namespace pellucid {
namespace {

// Where a tile lies in the output.
struct TilePlace {
    int64_t row, rows, column, columns;
};

struct Unchanged {
    PELLUCID_INLINE F16 operator()(F16 x) const { return x; }
};

// sums, gate [rows, stride]; gate is read where the layer has one.
template <class Activate>
void finish(const LinearLayer& layer, const TilePlace& tile, const float* sums, const float* gate, int64_t stride) {
    auto* const rounded = reinterpret_cast<bf16*>(layer.out) + tile.row * layer.rounded_stride + tile.column;
    for (int64_t r = 0; r < tile.rows; ++r, sums += stride, gate += stride) {
        const int64_t at = (tile.row + r) * layer.outputs + tile.column;
        for_each_vector(tile.columns, [&](int64_t i, auto count) {
            F16 value = load(sums + i, count);
            if (layer.bias) value = value + load(layer.bias + tile.column + i, count);
            if (layer.gate_weight) {
                F16 factor = load(gate + i, count);
                if (layer.gate_bias) factor = factor + load(layer.gate_bias + tile.column + i, count);
                value = Activate()(factor) * value;
            } else {
                value = Activate()(value);
            }
            if (layer.residual) value = load(layer.residual + at + i, count) + value;
            if (layer.rounded_stride > 0)
                store_for_layers(rounded + r * layer.rounded_stride + i, value, count);
            else
                store(layer.out + at + i, value, count);
        });
    }
}

__attribute__((noinline)) void finish(const LinearLayer& layer, const TilePlace& tile, const float* sums,
                                      const float* gate, int64_t stride) {
    switch (layer.activation) {
        case kRelu: return finish<Relu>(layer, tile, sums, gate, stride);
        case kGelu: return finish<Gelu>(layer, tile, sums, gate, stride);
        case kGeluTanh: return finish<GeluTanh>(layer, tile, sums, gate, stride);
        case kSilu: return finish<Silu>(layer, tile, sums, gate, stride);
        default: return finish<Unchanged>(layer, tile, sums, gate, stride);
    }
}

}  // namespace
}  // namespace pellucid
