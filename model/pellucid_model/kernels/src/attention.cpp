// Causal attention of a ragged batch over a paged key-value cache.
//
// Side effects, in order: the new keys (rotated) and values of all rows, where there are any, are written into the
// cache; then every row attends, reading all keys and values, its own included, from the cache. Prefill, chunked prefill and decode are
// therefore one computation; attention_tile.h fixes its order, so that no bit depends on what else is in the batch.
#include <optional>
#include <vector>

#include "attention_tile.h"

namespace pellucid {
namespace {

constexpr int kTokenRows = 48;  // (token, query head) pairs that share one reading of a key block, about

std::vector<TokenTile> token_tiles(const Arguments& a) {
    const int64_t most = std::max<int64_t>(1, kTokenRows / (a.query_heads / a.kv_heads));
    std::vector<TokenTile> tiles;
    for (int64_t row = 0; row < a.rows;) {
        int64_t end = row + 1;
        while (end < a.rows && end - row < most && a.row_sequence[end] == a.row_sequence[row]) ++end;
        tiles.push_back({row, end - row});
        row = end;
    }
    return tiles;
}

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

void store_all(float* to, const float* from, int64_t size) { std::copy(from, from + size, to); }
void store_all(bf16* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = to_bf16(from[i]);
}

template <class Element>
void write_cache(const Arguments& a, int64_t row, std::vector<float>& rotated) {
    rotated.resize(a.head_dim);
    const int64_t slot = a.positions[row] % a.block_size;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        const int64_t to = ((own_block(a, row) * a.kv_heads + head) * a.block_size + slot) * a.head_dim;
        rotate(a, a.k + row * a.k_stride + head * a.head_dim, a.positions[row], rotated.data());
        store_all(static_cast<Element*>(a.k_cache) + to, rotated.data(), a.head_dim);
        store_all(static_cast<Element*>(a.v_cache) + to, a.v + row * a.v_stride + head * a.head_dim, a.head_dim);
    }
}

// Multiply-adds of the whole call, about.
int64_t work(const Arguments& a) {
    int64_t keys = 0;
    for (int64_t row = 0; row < a.rows; ++row) {
        const Visible visible = visible_keys(a, row);
        keys += visible.sinks.end + visible.window.end - visible.window.begin;
    }
    return 4 * keys * a.query_heads * a.head_dim;
}

template <class Element>
int32_t paged_attention(const Arguments& a) {
    const std::vector<TokenTile> tiles = token_tiles(a);
    const int threads = useful_threads(a.threads, work(a));
    std::atomic<int32_t> status{kOk};
    std::vector<std::vector<float>> rotated(threads);
    if (a.k)
        for_each_unit(threads, a.rows, [&](int64_t row, int worker) { write_cache<Element>(a, row, rotated[worker]); });
    std::vector<std::optional<TileAttention<Element>>> attention(threads);
    for_each_unit(threads, static_cast<int64_t>(tiles.size()) * a.kv_heads, [&](int64_t unit, int worker) {
        if (!attention[worker]) attention[worker].emplace(a, status);
        attention[worker]->run(tiles[unit / a.kv_heads], unit % a.kv_heads);
    });
    return status;
}

}  // namespace
}  // namespace pellucid

// Returns a Status. Anything but kOk means that an argument is out of range and `out` is not to be used; except for a
// visible block that the table does not hold, nothing has been written to the cache then.
extern "C" int32_t pellucid_paged_attention(const pellucid::Arguments* arguments) {
    using namespace pellucid;
    if (const Status status = check(*arguments); status != kOk) return status;
    return arguments->cache_is_bfloat16 ? paged_attention<bf16>(*arguments) : paged_attention<float>(*arguments);
}
