// Rows looked up in a table of weights: embeddings, and positions that are learned or tabulated.
//
// A table has its rows one after the other, or is a head's weight in the panels of linear_formats.h, whose outputs are
// the rows. Numbers become float32 as they are.
#pragma once

#include "row_functions.h"

namespace pellucid {
namespace {

// Mirrors native.py's TABLE_FORMATS.
enum TableFormat : int32_t { kFloat32Rows, kBfloat16Rows, kFloat32Panels, kBfloat16Panels };

constexpr int64_t kPanelRows = 32;

// Column `row` of panels [steps][32], each entry one float32 or two bfloat16.
template <class Unpack>
void panel_row(const uint32_t* table, int64_t row, int64_t steps, const Unpack& unpack) {
    const uint32_t* entry = table + row / kPanelRows * steps * kPanelRows + row % kPanelRows;
    for (int64_t step = 0; step < steps; ++step) unpack(step, entry[step * kPanelRows]);
}

// out [width] = row of a table [count, width].
inline void look_up_row(const void* table, int32_t format, int64_t row, float* out, int64_t width) {
    switch (format) {
        case kFloat32Rows:
            std::memcpy(out, static_cast<const float*>(table) + row * width, width * sizeof(float));
            break;
        case kBfloat16Rows: {
            const bf16* numbers = static_cast<const bf16*>(table) + row * width;
            for_each_vector(width, [&](int64_t i, auto count) { store(out + i, load(numbers + i, count), count); });
            break;
        }
        case kFloat32Panels:
            panel_row(static_cast<const uint32_t*>(table), row, width,
                      [=](int64_t step, uint32_t bits) { out[step] = std::bit_cast<float>(bits); });
            break;
        case kBfloat16Panels:
            panel_row(static_cast<const uint32_t*>(table), row, (width + 1) / 2, [=](int64_t step, uint32_t bits) {
                out[2 * step] = std::bit_cast<float>(bits << 16);
                if (2 * step + 1 < width) out[2 * step + 1] = std::bit_cast<float>(bits & 0xffff0000u);
            });
            break;
    }
}

}  // namespace
}  // namespace pellucid
