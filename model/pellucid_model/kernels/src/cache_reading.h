// What the attention that comes next reads of the cache, given out in parts for others to fetch beforehand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pellucid {

// Rows of an attention call, each the only one of its sequence, and where their sequences' keys and values lie.
struct CachedRows {
    const std::byte *keys, *values;     // the cache
    int64_t block_bytes, token_bytes;   // from one block to the next; of a token of one head
    int64_t heads, block_size, granule;  // granule: tokens that are read together
    const int32_t *positions, *row_sequence, *block_tables, *window;  // as in attention_arguments.h
    int64_t table_width;
    int64_t row, end;  // the rows

    int64_t tokens(int64_t r) const { return positions[r] + 1; }
    int64_t first_block(int64_t r) const {
        const int64_t size = window ? window[row_sequence[r]] : 0;
        return size > 0 ? std::max<int64_t>(0, tokens(r) - size) / block_size : 0;
    }
    // Of what the rows read, about.
    int64_t bytes() const {
        int64_t sum = 0;
        for (int64_t r = row; r < end; ++r) sum += tokens(r) - first_block(r) * block_size;
        return 2 * sum * heads * token_bytes;
    }
};

// One worker's place in it.
class alignas(64) CacheReading {
public:
    CacheReading() = default;
    explicit CacheReading(const CachedRows& rows) : rows_(rows) { begin_row(); }

    // Where the next `bytes`, or at least a beginning of them, lie; null when all has been given out.
    const std::byte* next(int64_t bytes) {
        while (done_ >= run_bytes_)
            if (!next_run()) return nullptr;
        const std::byte* part = run_ + done_;
        done_ += bytes;
        return part;
    }

private:
    void begin_row() {
        if (rows_.row < rows_.end) block_ = rows_.first_block(rows_.row);
    }

    // All heads of a full block are one run, of one that is not each is its own; keys first, then values.
    bool next_run() {
        if (rows_.row >= rows_.end) return false;
        const int64_t filled = std::min(rows_.tokens(rows_.row) - block_ * rows_.block_size, rows_.block_size);
        const bool full = filled == rows_.block_size;
        const int32_t* table = rows_.block_tables + rows_.row_sequence[rows_.row] * rows_.table_width;
        const int64_t head_bytes = rows_.block_size * rows_.token_bytes;
        run_ = (of_values_ ? rows_.values : rows_.keys) + table[block_] * rows_.block_bytes + head_ * head_bytes;
        run_bytes_ = full ? rows_.heads * head_bytes
                          : (filled + rows_.granule - 1) / rows_.granule * rows_.granule * rows_.token_bytes;
        done_ = 0;
        if (!full && ++head_ < rows_.heads) return true;
        head_ = 0;
        of_values_ = !of_values_;
        if (of_values_ || ++block_ * rows_.block_size < rows_.tokens(rows_.row)) return true;
        ++rows_.row;
        begin_row();
        return true;
    }

    CachedRows rows_{};
    int64_t block_ = 0, head_ = 0;  // of the next run
    bool of_values_ = false;
    const std::byte* run_ = nullptr;
    int64_t run_bytes_ = 0, done_ = 0;
};

}  // namespace pellucid
