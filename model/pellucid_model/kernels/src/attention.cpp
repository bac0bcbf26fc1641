// Causal attention of a ragged batch over a paged key-value cache.
//
// The new keys (rotated) and values of a sequence's rows, where there are any, are written into the cache before these rows
// attend to them, reading all keys and values, their own included, from the cache. Prefill, chunked prefill and decode are
// therefore one computation; attention_tile.h fixes its order, so that no bit depends on what else is in the batch, or on
// how the work is cut here. What one sequence writes no other sequence sees in the same call.
#include <memory>
#include <vector>

#include "attention_tile.h"
#include "scratch.h"

namespace pellucid {
namespace {

constexpr int kTokenRows = 96;      // (token, query head) pairs that share one reading of a key block, about
constexpr int kTiledTokenRows = 192;  // where tiles multiply them
constexpr int kUnitsPerThread = 4;  // at least, where there is that much work; so that threads end together
constexpr int kHeadsPerThread = 8;  // the same where a row's heads are put together: rows differ more than parts of them

bool by_tiles([[maybe_unused]] const Arguments& a) {
#if defined(PELLUCID_AMX)
    return a.cache_format == kBfloat16Cache && TiledCache::fits(a);
#else
    return false;
#endif
}

// Key blocks of all rows that a range touches; widened row by row.
void widen(Range& blocks, const Range& positions) {
    if (positions.empty()) return;
    const Range touched{positions.begin / kBlock, (positions.end - 1) / kBlock + 1};
    blocks = blocks.empty() ? touched
                            : Range{std::min(blocks.begin, touched.begin), std::max(blocks.end, touched.end)};
}

struct Plan {
    std::vector<TokenTile> tiles;
    int64_t blocks = 0;  // key blocks times rows times kv heads
    int64_t work = 0;    // multiply-adds of the whole call, about
    bool whole = true;   // every tile has all rows of its sequence

    void make(const Arguments& a) {
        const int64_t rows = by_tiles(a) ? kTiledTokenRows : kTokenRows;
        const int64_t most = std::max<int64_t>(1, rows / (a.query_heads / a.kv_heads));
        int64_t keys = 0;
        tiles.clear();
        blocks = 0;
        whole = true;
        for (int64_t row = 0; row < a.rows;) {
            TokenTile tile{row, 0, a.positions[row], {0, 0}, {0, 0}};
            do {
                const Visible visible = visible_keys(a, row);
                tile.lowest = std::min(tile.lowest, a.positions[row]);
                widen(tile.sink_blocks, visible.sinks);
                widen(tile.window_blocks, visible.window);
                keys += visible.sinks.size() + visible.window.size();
                ++tile.count;
                ++row;
            } while (row < a.rows && tile.count < most && a.row_sequence[row] == a.row_sequence[tile.first]);
            whole = whole && (tiles.empty() || a.row_sequence[tiles.back().first] < a.row_sequence[tile.first]);
            tiles.push_back(tile);
            blocks += tile.count * tile.pieces() * a.kv_heads;
        }
        work = 4 * keys * a.query_heads * a.head_dim;
    }
};

// What one thread does at a time: a tile's pieces [begin, end) of one kv head, or all pieces of some.
struct Unit {
    const TokenTile* tile;
    Heads heads;
    int32_t begin, end;
    int64_t partials;  // where the tile's partials begin; -1: none are kept

    KeyBlock first_block(const Arguments& a) const { return tile->block(a, heads.first, begin); }
};

struct Units {
    std::vector<Unit> all, split;  // split: one for each tile and head that is in parts
    int64_t partials = 0;          // numbers
    // Each tile's last unit of a head writes its keys and values before it attends to them: no other unit sees them.
    bool write = true;

    // Tiles that would keep a thread busy for long are cut, so that the others have something to do.
    // most_rows: (token, query head) pairs of a unit that has several heads.
    void make(const Arguments& a, const Plan& plan, int threads, int64_t most_rows) {
        const int64_t group = a.query_heads / a.kv_heads, stride = divide_up(a.head_dim, 16) * 16;
        const int64_t most = std::max<int64_t>(1, plan.blocks / (kUnitsPerThread * threads));
        const auto tiles = static_cast<int64_t>(plan.tiles.size());
        const int64_t most_heads = std::min(most_rows / group, tiles * a.kv_heads / (kHeadsPerThread * threads));
        all.clear();
        split.clear();
        partials = 0;
        write = plan.whole;
        for (const TokenTile& each : plan.tiles) {
            const TokenTile* tile = &each;
            const int64_t cost = tile->count * tile->pieces();
            const int64_t parts = threads == 1 ? 1 : std::min<int64_t>(divide_up(cost, most), tile->pieces());
            if (parts <= 1) {
                const int64_t together = tile->count > 1 ? 1 : std::min(most_heads, most / cost);
                const EvenParts heads(a.kv_heads, std::max<int64_t>(together, 1));
                for (int64_t i = 0; i < heads.count; ++i)
                    all.push_back({tile, {heads.begin(i), heads.size(i)}, 0, tile->pieces(), -1});
                continue;
            }
            write = write && tile->count == 1;
            for (int64_t head = 0; head < a.kv_heads; ++head) {
                split.push_back({tile, {head, 1}, 0, tile->pieces(), partials});
                for (int64_t part = 0; part < parts; ++part) {
                    const auto begin = static_cast<int32_t>(tile->pieces() * part / parts);
                    const auto end = static_cast<int32_t>(tile->pieces() * (part + 1) / parts);
                    all.push_back({tile, {head, 1}, begin, end, partials});
                }
                partials += tile->pieces() * Partial::size(tile->count * group, stride);
            }
        }
        // A thread begins with rows that it computed; of prompts with the last of them, which see most.
        const auto count = static_cast<int64_t>(all.size());
        for (int worker = 0; worker < threads && tiles < a.rows; ++worker)
            std::reverse(all.begin() + first_unit(worker, count, threads),
                         all.begin() + first_unit(worker + 1, count, threads));
    }
};

// The cache block that row `row` writes to, or -1.
int64_t own_block(const Arguments& a, int64_t row) {
    const int32_t block = a.block_tables[a.row_sequence[row] * a.table_width + a.positions[row] / a.block_size];
    return block < a.blocks ? block : -1;
}

Status check(const Arguments& a) {
    const int64_t capacity = a.table_width * a.block_size;
    const int64_t rotatable = a.cos ? a.rotary_positions : INT32_MAX;
    for (int64_t row = 0; row < a.rows; ++row) {
        if (a.row_sequence[row] < 0 || a.row_sequence[row] >= a.sequences) return kBadRowSequence;
        if (a.positions[row] < 0 || a.positions[row] >= std::min(capacity, rotatable)) return kBadPosition;
        const int64_t for_sinks = sink_query_position(a, row);
        if (for_sinks < 0 || for_sinks >= rotatable) return kBadSinkQueryPosition;
        if (own_block(a, row) < 0) return kBadBlock;
    }
    return kOk;
}

// What a thread keeps from call to call.
template <class Format>
struct Kept {
    TileAttention<Format> attention;
    CacheWriter<Format> writer;
};

template <class Format>
Kept<Format>& kept() {
    static thread_local const auto own = std::make_unique<Kept<Format>>();
    return *own;
}

// Of row `row`, for kv heads [head, end_head).
template <class Format>
void write_row(CacheWriter<Format>& writer, const Arguments& a, int64_t row, int64_t head, int64_t end_head) {
    writer.start(a);
    writer.write(a, row, own_block(a, row), head, end_head);
}

template <class Format>
void write_cache(const Arguments& a) {
    for_each_row(a.threads, a.rows, 4 * a.kv_heads * a.head_dim,
                 [&](int64_t row) { write_row(kept<Format>().writer, a, row, 0, a.kv_heads); });
}

// Prefetches what a unit begins with, the linear layer's output: another core may have it.
void fetch_rows(const Arguments& a, const Unit& unit) {
    const int64_t row = unit.tile->first, group = a.query_heads / a.kv_heads, numbers = unit.heads.count * a.head_dim;
    const auto fetch = [](const float* numbers, int64_t count) {
        for (int64_t i = 0; i < count; i += 16) prefetch(numbers + i);
    };
    fetch(a.q + row * a.q_stride + unit.heads.first * group * a.head_dim, group * numbers);
    if (!a.k) return;
    fetch(a.k + row * a.k_stride + unit.heads.first * a.head_dim, numbers);
    fetch(a.v + row * a.v_stride + unit.heads.first * a.head_dim, numbers);
}

// Of a unit that has several heads: one alone has few rows, and waits for every single result.
template <class Format>
int64_t rows_at_once(const Arguments& a) {
    return GranuleFinder<Format>::are_whole(a) ? Scores<Format>::kFetchingRows : 0;
}

template <class Format>
int32_t paged_attention(const Arguments& a) {
    static thread_local Plan plan;
    static thread_local Units units;
    plan.make(a);
    const int threads = useful_threads(a.threads, plan.work);
    units.make(a, plan, threads, rows_at_once<Format>(a));
    float* const partials = a.partials ? a.partials : scratch<float, kAttentionPartials>(units.partials);
    std::atomic<int32_t> own_status{kOk};
    std::atomic<int32_t>& status = a.status ? *a.status : own_status;
    if (a.k && !units.write) write_cache<Format>(a);
    const auto count = static_cast<int64_t>(units.all.size());
    for_each_unit(threads, count, [&, &units = units](int64_t i, int worker) {
        const UsingTiles<Exponentials<Format>::kByTiles> matrix_unit;
        const Unit& unit = units.all[i];
        const TokenTile& tile = *unit.tile;
        const bool last = i + 1 == count || i + 1 == first_unit(worker + 1, count, threads);
        const KeyBlock next = last ? KeyBlock{} : units.all[i + 1].first_block(a);
        if (!last) fetch_rows(a, units.all[i + 1]);
        auto& own = kept<Format>();
        const bool writes = a.k && units.write && unit.end == tile.pieces();
        const auto write = [&] {
            if (!writes) return;
            for (int64_t row = tile.first; row < tile.first + tile.count; ++row)
                write_row(own.writer, a, row, unit.heads.first, unit.heads.first + unit.heads.count);
        };
        if (unit.partials < 0)
            own.attention.run(a, status, tile, unit.heads, next, write);
        else
            own.attention.run_part(a, status, tile, unit.heads.first, next, write, unit.begin, unit.end,
                                   partials + unit.partials);
    });
    const auto split = static_cast<int64_t>(units.split.size());
    if (split == 0) return status;
    for_each_unit(threads, split, [&, &units = units](int64_t i, int) {
        const Unit& unit = units.split[i];
        kept<Format>().attention.finish(a, status, *unit.tile, unit.heads.first, partials + unit.partials);
    });
    return status;
}

}  // namespace
}  // namespace pellucid

// Numbers of `partials` that a call needs on any number of threads up to its own, for fewer cut less; or, where an
// argument is out of range, the Status, negative.
extern "C" int64_t pellucid_count_partials(const pellucid::Arguments* arguments) {
    using namespace pellucid;
    static thread_local Plan plan;
    static thread_local Units units;
    if (const Status status = check(*arguments); status != kOk) return -status;
    plan.make(*arguments);
    units.make(*arguments, plan, arguments->threads, 0);
    return units.partials;
}

// Returns a Status. Anything but kOk means that an argument is out of range and `out` is not to be used; except for a
// visible block that the table does not hold, nothing has been written to the cache then.
extern "C" int32_t pellucid_paged_attention(const pellucid::Arguments* arguments) {
    using namespace pellucid;
    if (const Status status = check(*arguments); status != kOk) return status;
    switch (arguments->cache_format) {
        case kBfloat16Cache:
#if defined(PELLUCID_AMX)
            if (by_tiles(*arguments)) return paged_attention<TiledCache>(*arguments);
#endif
            return paged_attention<Bfloat16Format>(*arguments);
        case kInt8Cache: return paged_attention<Int8Cache>(*arguments);
        default: return paged_attention<Float32Format>(*arguments);
    }
}
