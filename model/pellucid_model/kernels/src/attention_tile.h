// Attention of one tile: some consecutive rows of a sequence, all query heads of one kv head, over all keys they see; or one
// row, of several kv heads.
//
// A row's result has one arithmetic, whatever shares its batch or its tile:
//   - The keys it sees are one or two ranges of positions: sinks the window has left behind, then the window.
//   - Each range is cut at multiples of 128 positions. A piece gives a partial softmax of its own
//     (largest score, sum of exponentials, weighted sum of values), each a chain in ascending key order. (Of heads
//     so small that a row's values are one vector, four chains, each over every fourth granule, so that a single row
//     need not wait for every addition. In AMX's tiles, values are summed as amx.h says, 32 keys at a time.)
//   - The partials are merged in that order, at once or after several threads have made them.
// Queries and exponentials are rounded to bfloat16 where the cache is bfloat16, and to whole numbers of 15 bits where
// it is int8; sums are float32, or exact. Keys a row does not see are masked or skipped, and their values are multiplied
// by 0 if by anything, and only where they are finite, so a NaN there stays there.
#pragma once

#include <atomic>
#include <limits>
#include <vector>

#include "attention_int8.h"
#include "attention_tiles.h"

namespace pellucid {
namespace {

// Rows first to first + count - 1, consecutive rows of one sequence, and the key blocks that hold what they see.
struct TokenTile {
    int64_t first, count;
    int32_t lowest;                    // of their positions
    Range sink_blocks, window_blocks;  // in units of kBlock positions

    int32_t pieces() const { return sink_blocks.size() + window_blocks.size(); }
    bool to_sinks(int32_t piece) const { return piece < sink_blocks.size(); }
    KeyBlock block(const Arguments& a, int64_t kv_head, int32_t piece) const {
        const int32_t end = to_sinks(piece) ? start(piece) + kBlock : a.positions[first + count - 1] + 1;
        return {a.row_sequence[first], kv_head, start(piece), end};
    }
    int32_t start(int32_t piece) const {  // a position
        return kBlock * (to_sinks(piece) ? sink_blocks.begin + piece : window_blocks.begin + piece - sink_blocks.size());
    }
};

// What a piece gives some rows of a tile: [rows, stride], [rows], [rows]. sum 0: the row sees nothing of it. Scores are in
// units of ln 2, so that exponentials are powers of two.
struct Partial {
    float *values, *largest, *sum;

    Partial(float* memory, int64_t rows, int64_t stride)
        : values(memory), largest(memory + rows * stride), sum(largest + rows) {}
    Partial(float* values, float* largest, float* sum) : values(values), largest(largest), sum(sum) {}
    Partial from(int64_t row, int64_t stride) const { return {values + row * stride, largest + row, sum + row}; }
    static int64_t size(int64_t rows, int64_t stride) { return divide_up(rows * (stride + 2), 16) * 16; }
};

// Some kv heads, more than one only of a tile that is one row.
struct Heads {
    int64_t first, count;
};

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kQueriesAhead = 2;  // rows whose queries come from another core's cache meanwhile

// One tile of rows of one kv head, or one row of several, with the memory it works in. Kept by a thread from call to call.
template <class Format>
class TileAttention {
public:
    // Attends over all keys and writes the rows of `out`. next: what this thread needs afterwards, to be prefetched.
    // write() is called before the first piece that has a position of the tile's own rows: late, for then that part of
    // the cache has been prefetched.
    template <class Write>
    void run(const Arguments& arguments, std::atomic<int32_t>& status, const TokenTile& tile, const Heads& heads,
             const KeyBlock& next, const Write& write) {
        start(arguments, status, tile, heads);
        const Partial partial(memory_.data(), std::min<int64_t>(rows_, Scores<Format>::kRows), stride_);
        const auto place = [&](int32_t, int64_t) { return partial; };
        const auto done = [&](int64_t row, int64_t count) { merge(partial, row, count); };
        for_each_piece(0, tile.pieces(), next, write, place, done);
        write_result();
    }

    // Makes the partials of pieces [begin, end) only, at `memory` + piece * Partial::size.
    template <class Write>
    void run_part(const Arguments& arguments, std::atomic<int32_t>& status, const TokenTile& tile, int64_t kv_head,
                  const KeyBlock& next, const Write& write, int32_t begin, int32_t end, float* memory) {
        start(arguments, status, tile, {kv_head, 1});
        const auto place = [&](int32_t piece, int64_t row) {
            return Partial(memory + piece * Partial::size(rows_, stride_), rows_, stride_).from(row, stride_);
        };
        for_each_piece(begin, end, next, write, place, [](int64_t, int64_t) {});
    }

    // Merges what run_part has made of all pieces, and writes the rows of `out`.
    void finish(const Arguments& arguments, std::atomic<int32_t>& status, const TokenTile& tile, int64_t kv_head,
                float* memory) {
        start(arguments, status, tile, {kv_head, 1});
        for (int32_t piece = 0; piece < tile.pieces(); ++piece)
            merge(Partial(memory + piece * Partial::size(rows_, stride_), rows_, stride_), 0, rows_);
        write_result();
    }

private:
    void start(const Arguments& arguments, std::atomic<int32_t>& status, const TokenTile& tile, const Heads& heads) {
        a_ = &arguments;
        status_ = &status;
        tile_ = tile;
        heads_ = heads;
        group_ = a_->query_heads / a_->kv_heads;
        rows_ = tile.count * heads.count * group_;
        stride_ = divide_up(a_->head_dim, 16) * 16;
        block_.start(arguments, a_->row_sequence[tile.first], heads.first, heads.count);
        scores_.start(arguments, rows_);
        rotated_.resize(a_->head_dim);
        ranges_.resize(rows_);
        local_.resize(rows_);
        memory_.resize(Partial::size(std::min<int64_t>(rows_, Scores<Format>::kRows), stride_));
        total_.assign(rows_ * stride_, 0.0f);
        largest_.assign(rows_, -INFINITY);
        sum_.assign(rows_, 0.0f);
        before_.resize(rows_);
        added_.resize(rows_);
    }

    template <class Write, class Place, class Done>
    void for_each_piece(int32_t begin, int32_t end, const KeyBlock& next, const Write& write, const Place& place,
                        const Done& done) {
        bool written = false;
        for (int32_t piece = begin; piece < end; ++piece) {
            if (!written && tile_.start(piece) + kBlock > tile_.lowest) {
                write();
                written = true;
            }
            const bool to_sinks = tile_.to_sinks(piece);
            if (piece == begin || to_sinks != tile_.to_sinks(piece - 1)) look_at(to_sinks);
            const KeyBlock following = piece + 1 < end ? tile_.block(*a_, heads_.first, piece + 1) : next;
            const auto place_of_rows = [&](int64_t row) { return place(piece, row); };
            attend_block(tile_.start(piece), to_sinks, following, place_of_rows, done);
        }
    }

    struct Place {
        int64_t row, head;  // of the batch, and which of the query heads
    };
    Place place_of(int64_t r) const {
        const int64_t head = heads_.first * group_;
        return tile_.count == 1 ? Place{tile_.first, head + r} : Place{tile_.first + r / group_, head + r % group_};
    }

    // Few rows wait for memory.
    void fetch_some() {
        if (rows_ <= Scores<Format>::kRows) block_.fetch_some();
    }

    // Prepares the queries and ranges of all rows.
    void look_at(bool to_sinks) {
        for (int64_t t = 0; t < tile_.count; ++t) {
            const int64_t row = tile_.first + t;
            const Visible visible = visible_keys(*a_, row);
            const int64_t position = to_sinks ? sink_query_position(*a_, row) : a_->positions[row];
            const float* heads = a_->q + row * a_->q_stride + heads_.first * group_ * a_->head_dim;
            for (int64_t d = 0; t + kQueriesAhead < tile_.count && d < group_ * a_->head_dim; d += 16)
                prefetch(heads + kQueriesAhead * a_->q_stride + d);
            for (int64_t h = 0; h < heads_.count * group_; ++h) {
                const int64_t r = t * group_ + h;
                scores_.set_query(r, rotated(*a_, heads + h * a_->head_dim, position, rotated_.data()));
                fetch_some();
                ranges_[r] = to_sinks ? visible.sinks : visible.window;
            }
        }
        common_ = ranges_[0];
        for (const Range& range : ranges_) common_ = common_.clip(range.begin, range.end);
        sees_whole_ = false;
    }

    // All rows' partials of a block, some rows after the others. place(row): where those from `row` on go; done(row, count):
    // they are there.
    template <class Place, class Done>
    void attend_block(int32_t start, bool to_sinks, const KeyBlock& next, const Place& place, const Done& done) {
        const SeenKeys seen = look_at_block(start);
        const bool found = !seen.any.empty() && block_.find(start, seen.any, local_, next);
        if (!seen.any.empty() && !found) *status_ = kBadBlock;
        const EvenParts parts(rows_, Scores<Format>::kRows);
        for (int64_t part = 0; part < parts.count; ++part) {
            const int64_t begin = parts.begin(part), count = parts.size(part);
            const Partial partial = place(begin);
            const SeenKeys own = sees_whole_ || parts.count == 1 ? seen.from(begin) : SeenKeys(&local_[begin], count);
            if (found && !own.any.empty()) {
                attend_rows(begin, count, own, start, to_sinks, partial);
                done(begin, count);
            } else {
                std::fill_n(partial.sum, count, 0.0f);
                std::fill_n(partial.largest, count, -INFINITY);
            }
        }
        if (found && rows_ <= Scores<Format>::kFetchingRows) block_.skip(seen.any);
    }

    // What all rows see of a block, in local_ too.
    SeenKeys look_at_block(int32_t start) {
        const bool before = sees_whole_;
        sees_whole_ = common_.begin <= start && start + kBlock <= common_.end;
        if (!(before && sees_whole_))
            for (int64_t r = 0; r < rows_; ++r) local_[r] = ranges_[r].clip(start, start + kBlock).from(start);
        return sees_whole_ ? SeenKeys::whole(local_.data()) : SeenKeys(local_.data(), rows_);
    }

    // Rows [begin, begin + count), which see something.
    void attend_rows(int64_t begin, int64_t count, const SeenKeys& seen, int32_t start, bool to_sinks,
                     const Partial& partial) {
        const int first = seen.any.begin / kGranule, last = (seen.any.end + kGranule - 1) / kGranule;
        auto granules = block_.of_head(0, first, last);
        const auto take_head_of = [&](int64_t row) {
            if (heads_.count > 1) granules = block_.of_head(row / group_, first, last);
        };
        const int64_t end = begin + count, step = heads_.count > 1 ? group_ : count;  // several heads are one part
        for (int64_t row = begin; row < end; row += step) {
            take_head_of(row);
            scores_.run(row, step, granules, first, last, &score_[(row - begin) * kBlock]);
        }
        softmax(begin, end, seen.any, start, to_sinks, partial);
        for (int64_t row = begin; row < end; row += step) {
            take_head_of(row);
            values_.run(*a_, granules, &score_[(row - begin) * kBlock], seen.from(row - begin), step,
                        partial.values + (row - begin) * stride_);
        }
    }

    // What a head adds for 16 keys that stand `distance`, distance - 1, … behind the query; the table's last column
    // counts for all that is farther. Keys in front of the query are masked afterwards.
    F16 bias_by_distance(int64_t head, int64_t distance) const {
        const float* table = a_->distance_bias + head * a_->bias_width;
        float bias[16];
        for (int i = 0; i < 16; ++i) bias[i] = table[std::clamp<int64_t>(distance - i, 0, a_->bias_width - 1)];
        return load(bias);
    }

    // Scores beyond a mere factor, with what the model adds to them or bounds them by: 16 of a row, from key `key` on.
    F16 adjusted(F16 s, int64_t head, int64_t query, int64_t key) const {
        s = s * broadcast(a_->scale);
        if (a_->softcap > 0) s = broadcast(a_->softcap) * tanh(s / broadcast(a_->softcap));
        if (a_->alibi_slopes) {
            const F16 distance = broadcast(static_cast<float>(query)) - lane_indices() - broadcast(static_cast<float>(key));
            s = fma(broadcast(-a_->alibi_slopes[head]), distance, s);
        }
        if (a_->distance_bias) s = s + bias_by_distance(head, query - key);
        return s * broadcast(kLog2E);
    }

    // Whether scores are only multiplied. That does not change which is the largest, so it is done when that is known.
    bool is_plain() const {
        return a_->scale > 0 && !(a_->softcap > 0) && !a_->alibi_slopes && !a_->distance_bias;
    }

    // The largest of a row's scores, one for every lane; what is more than a factor of them is done, and what the row does not
    // see hidden.
    PELLUCID_INLINE F16 largest_scores(int64_t r, bool plain, float* scores, int32_t start, bool to_sinks) const {
        const Range seen = local_[r];
        const F16 unseen = broadcast(-INFINITY);
        F16 largest = unseen;
        if (seen.empty()) return unseen;
        if (plain && seen.size() == kBlock) {
#pragma GCC unroll 8
            for (int at = 0; at < kBlock; at += 16) largest = max(largest, load(scores + at));
            return largest;
        }
        for (int at = seen.begin / 16 * 16; at < seen.end; at += 16) {
            F16 s = load(scores + at);
            const bool whole = seen.begin <= at && at + 16 <= seen.end;
            if (!plain) {
                const auto [row, head] = place_of(r);
                const int64_t query = to_sinks ? sink_query_position(*a_, row) : a_->positions[row];
                s = adjusted(s, head, query, start + at);
            }
            if (!whole) s = keep_lanes(s, seen.begin - at, seen.end - at, unseen);
            if (!plain || !whole) store(scores + at, s);
            largest = max(largest, s);
        }
        return largest;
    }

    // Turns the scores of rows [begin, end) into exponentials relative to each row's largest, for all keys that are multiplied
    // with values if any row sees something there; what a row itself does not see becomes 0. In two passes, so that a processor
    // has several rows in work: a row has to wait for its largest score.
    __attribute__((noinline)) void softmax(int64_t begin, int64_t end, Range any, int32_t start, bool to_sinks,
                                           const Partial& partial) {
        using Weights = Exponentials<Format>;
        const bool plain = is_plain();
        const float scale = plain ? a_->scale * kLog2E : 1.0f;
        alignas(64) float lanes[16 * 16] = {};  // what sixteen rows are reduced from
        float largest[Scores<Format>::kRows];
        for_each_sixteen(begin, end, [&](int64_t r, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
                store(lanes + 16 * i, largest_scores(r + i, plain, score_ + (r + i - begin) * kBlock, start, to_sinks));
                fetch_some();
            }
            horizontal_maxima(lanes, count, largest + (r - begin));
            Weights::between_products();
        });
        constexpr int32_t kKeys = Weights::kKeys;
        any = {any.begin / kKeys * kKeys, (any.end + kKeys - 1) / kKeys * kKeys};
        for_each_sixteen(begin, end, [&](int64_t r, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
                const float bound = largest[r + i - begin];
                partial.largest[r + i - begin] = bound * scale;
                store(lanes + 16 * i, exponentials(local_[r + i], any, bound, scale, score_ + (r + i - begin) * kBlock));
            }
            horizontal_sums(lanes, count, partial.sum + (r - begin));
            Weights::between_products();
        });
    }

    // Of a row: in the place of its scores, and their sum, in parts.
    static PELLUCID_INLINE F16 exponentials(Range seen, Range any, float largest, float scale, float* scores) {
        using Weights = Exponentials<Format>;
        // Finite, so that keys that a bias of -infinity hides weigh nothing, where it hides all of them too.
        const F16 reference = broadcast(std::max(largest, std::numeric_limits<float>::lowest())), unit = broadcast(scale);
        F16 sum = broadcast(0.0f);
        const auto add = [&](int at) {
            const F16 e = Weights::of(load(scores + at), reference, unit);
            Weights::put(scores, at, e);
            sum = sum + e;
        };
        if (seen.size() == kBlock) {
#pragma GCC unroll 8
            for (int at = 0; at < kBlock; at += 16) add(at);
            return sum;
        }
        if (seen.empty()) seen = {any.end, any.end};
        const int begin = seen.begin / 16 * 16, end = (seen.end + 15) / 16 * 16;
        for (int at = any.begin; at < begin; at += 16) Weights::put(scores, at, broadcast(0.0f));
        for (int at = begin; at < end; at += 16) add(at);
        for (int at = end; at < any.end; at += 16) Weights::put(scores, at, broadcast(0.0f));
        return sum;
    }

    // body(row, count) for rows [begin, end), sixteen at a time.
    template <class Body>
    static PELLUCID_INLINE void for_each_sixteen(int64_t begin, int64_t end, const Body& body) {
        for (int64_t r = begin; r < end; r += 16) body(r, std::min<int64_t>(16, end - r));
    }

    // The partials of rows [begin, begin + count).
    void merge(const Partial& partial, int64_t begin, int64_t count) {
        weigh(partial, begin, count);
        for (int64_t i = 0; i < count; ++i) {
            if (partial.sum[i] == 0.0f) continue;
            fetch_some();
            const int64_t r = begin + i;
            const F16 before = broadcast(before_[r]), added = broadcast(added_[r]);
            const float* values = partial.values + i * stride_;
            float* total = &total_[r * stride_];
            sum_[r] = sum_[r] * before_[r] + partial.sum[i] * added_[r];
            for (int64_t d = 0; d < stride_; d += 16)
                store(total + d, load(total + d) * before + load(values + d) * added);
        }
    }

    // The factors that bring each row's total and partial to the larger of their largest scores.
    void weigh(const Partial& partial, int64_t begin, int64_t rows) {
        for_each_sixteen(begin, begin + rows, [&](int64_t r, int64_t some) {
            const int count = static_cast<int>(some);
            const F16 before = load(&largest_[r], count), added = load(partial.largest + (r - begin), count);
            const F16 largest = max(added, before);
            store(&before_[r], exp2(before - largest), count);
            store(&added_[r], exp2(added - largest), count);
            store(&largest_[r], largest, count);
        });
    }

    void write_result() {
        for (int64_t r = 0; r < rows_; ++r) {
            fetch_some();
            const F16 factor = broadcast(1.0f / sum_[r]);
            const auto [row, head] = place_of(r);
            float* out = a_->out + (row * a_->query_heads + head) * a_->head_dim;
            bf16* const rounded = reinterpret_cast<bf16*>(a_->out) + row * a_->rounded_stride + head * a_->head_dim;
            for (int64_t d = 0; d < a_->head_dim; d += 16) {
                const F16 value = load(&total_[r * stride_ + d]) * factor;
                const int count = static_cast<int>(std::min<int64_t>(16, a_->head_dim - d));
                if (a_->rounded_stride > 0)
                    store_for_layers(rounded + d, value, count);
                else
                    store(out + d, value, count);
            }
        }
    }

    const Arguments* a_ = nullptr;
    std::atomic<int32_t>* status_ = nullptr;
    TokenTile tile_{};
    Heads heads_{0, 1};
    int64_t group_ = 0;
    int64_t rows_ = 0;    // (token, query head) pairs, the heads of a token side by side
    int64_t stride_ = 0;  // head_dim, in whole vectors
    GranuleFinder<Format> block_;
    Scores<Format> scores_;
    ValueSum<Format> values_;
    AlignedVector<float> rotated_;       // [head_dim]
    std::vector<Range> ranges_, local_;  // [rows]; local_: in this block, from its start
    Range common_{0, 0};                 // of ranges_
    bool sees_whole_ = false;            // every row, of this block
    alignas(64) float score_[Scores<Format>::kMemoryRows * kBlock] = {};
    AlignedVector<float> memory_;                 // a Partial
    AlignedVector<float> total_, largest_, sum_;  // of all blocks so far
    AlignedVector<float> before_, added_;         // factors of a merge
};

}  // namespace
}  // namespace pellucid
