// Asks the system for the matrix unit, and sets up its tiles.
#include "amx.h"

#if defined(PELLUCID_AMX)

extern "C" int pellucid_cpu_supports(const char* variant);

namespace pellucid {
namespace {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

constexpr TileShapes all_whole() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = kTileBytes;
        shapes.rows[tile] = kTileSide;
    }
    return shapes;
}

constexpr TileShapes kWhole = all_whole();

thread_local int uses = 0;

// Whoever loads this library wants its tiles, whether the system has been asked for them or not.
[[maybe_unused]] const int permission = pellucid_cpu_supports("amx");

}  // namespace

void enter_tiles() {
    if (uses++ == 0) _tile_loadconfig(&kWhole);
}

// The system saves tiles only while they are in use.
void leave_tiles() {
    if (--uses == 0) _tile_release();
}

}  // namespace pellucid

#endif
