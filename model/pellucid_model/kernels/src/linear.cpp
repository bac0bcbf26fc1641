// Linear layers over weights packed in panels of 32 output columns: out[T, N] = x[T, K] weight[N, K]^T + bias[N].
//
// A panel is one run of memory, and a tile of the output reads it from its beginning to its end. A format says
//   left_per_row, prepare   what a row of x is turned into, once per call
//   panel_bytes             how long a panel is
//   multiply                the sums of Rows rows by Vectors * 16 columns, the same bits whatever Rows and Vectors are; or
//   multiply_tiles          the same, where heights are multiples of kStep (of kWideStep, two panels wide); `again` says that
//                           other rows read the panel next
//   kRows, kWideRows        the most rows of a tile that is one panel wide, and of one that is two panels wide (0: none is)
//   kOnceRows               the most rows that wait for memory
//   kRowsApart              from so many rows a thread on, each takes rows of its own and reads all weights
//   kHeldRowBytes           of prepared rows of a thread in the next cache then
//   between_products        what is done after every kFinishedRows rows of sums have gone out
//   kCachedShift            how much of the cache a tile can fetch meanwhile: its own bytes shifted right. Faster than a
//                           line in 64 cycles or so, as here, and the weights come late
// Formats: linear_formats.h, quantized_formats.h; in tiles linear_tiles.h, quantized_tiles.h. What a tile's sums go through on
// their way out: linear_finish.h.
#include <optional>

#include "linear_fetching.h"
#include "linear_finish.h"
#include "linear_tiles.h"
#include "parallel.h"
#include "quantized_tiles.h"
#include "scratch.h"

namespace pellucid {
namespace {

template <class Format>
class Linear {
    using Left = typename Format::Left;

public:
    explicit Linear(const LinearArguments& arguments)
        : a_(arguments), stride_(Format::left_per_row(a_.inputs)), panel_bytes_(Format::panel_bytes(a_.inputs)) {
        int64_t outputs = 0;
        for (int64_t i = 0; i < a_.layer_count; ++i) outputs += a_.layers[i].outputs * matrices(a_.layers[i]);
        threads_ = useful_threads(a_.threads, a_.rows * a_.inputs * outputs);
        for (int64_t i = 0; i < a_.layer_count; ++i) runs_each_ += runs_of(a_.layers[i]);
    }

    void run() {
        if (a_.rows == 0) return;
        left_ = prepare();
        multiply();
    }

    static int64_t prepared_bytes(const LinearArguments& a) {
        return takes_floats(a) || a.is_rounded ? 0 : left_count(a) * static_cast<int64_t>(sizeof(Left));
    }

    FirstWeights first_weights(int worker) const {
        if (!reads_once() || worker >= threads_) return {};
        const Run visit = first_visit_of(worker);
        const Weights weights = read(visit);
        const std::byte* first = weights.gate ? weights.gate : weights.weights;
        return {first, first + (a_.rows <= Format::kWideRows ? half(visit) : 0) * panel_bytes_};
    }

private:
    static int matrices(const LinearLayer& layer) { return layer.gate_weight ? 2 : 1; }

    // Of prepared rows, and of those that a tile may read behind them.
    static int64_t left_count(const LinearArguments& a) {
        constexpr int64_t kBehind = Format::kStep > 1 ? Format::kRows - 1 : 0;
        static_assert(kBehind <= kRowsBehind);
        return (a.rows + kBehind) * Format::left_per_row(a.inputs);
    }

    template <int Vectors>
    static constexpr int step_of() {
        return Vectors > 2 ? Format::kWideStep : Format::kStep;
    }

    static bool takes_floats(const LinearArguments& a) { return Format::kTakesFloats && a.norm == kNoNorm; }

    // A team shares out many rows. Of few each member prepares all for itself, which takes less time than to wait for
    // the others.
    const Left* prepare() const {
        if constexpr (Format::kTakesFloats)
            if (takes_floats(a_)) return a_.x;
        if (a_.is_rounded) return reinterpret_cast<const Left*>(a_.x);
        const int64_t work = a_.inputs * kPrepareWork;
        const bool shared = useful_threads(threads_, a_.rows * work) > 1;
        Left* const left =
            shared && a_.prepared ? static_cast<Left*>(a_.prepared) : scratch<Left, kPreparedRows>(left_count(a_));
        const auto prepare_row = [&](int64_t row) {
            Format::prepare(normalised(a_.x + row * a_.inputs), a_.inputs, left + row * stride_);
        };
        if (shared)
            for_each_row(threads_, a_.rows, work, prepare_row);
        else
            for (int64_t row = 0; row < a_.rows; ++row) prepare_row(row);
        return left;
    }

    const float* normalised(const float* x) const {
        if (a_.norm == kNoNorm) return x;
        float* out = scratch<float, kNormalisedRow>(a_.inputs);
        if (a_.norm == kRmsNorm)
            rms_norm_row(x, a_.norm_weight, out, a_.inputs, a_.norm_epsilon);
        else
            layer_norm_row(x, a_.norm_weight, a_.norm_bias, out, a_.inputs, a_.norm_epsilon);
        return out;
    }

    // Panels [first, last) of a layer, and of its gate.
    struct Run {
        const LinearLayer* layer;
        int64_t first, last;
    };

    // A unit is a run of panels for a part of the rows. In every part it is visited a few panels at a time, by all row
    // tiles: the panels stay in the nearest cache, the part's rows in the next one.
    void multiply() const {
        const EvenParts parts = row_parts();
        std::optional<Linear> operator_behind;  // made here, for within a unit there is one thread
        const bool fetches_next = !reads_once() && a_.next && a_.next->format == a_.format && a_.next->rows > 0;
        if (fetches_next) operator_behind.emplace(*a_.next);
        const int64_t units = runs_each_ * threads_ * parts.count;
        for_each_unit(threads_, units, [&](int64_t unit, int worker) {
            const UsingTiles<(Format::kStep > 1)> matrix_unit;
            const auto [run, part] = place_of(unit, parts.count);
            const int64_t row = parts.begin(part), rows = parts.size(part);
            const bool last = unit + 1 == first_unit(worker + 1, units, threads_);
            const Weights then = last ? read_behind(operator_behind, worker) : first_read(place_of(unit + 1, parts.count).run);
            const EvenParts tiles(rows, Format::kRows);
            for (Run visit = first_visit(run); visit.first < run.last; visit = next_visit(run, visit)) {
                const Run next = next_visit(run, visit);
                const int64_t products = tiles.count * (visit.last - visit.first) * matrices(*run.layer);
                const Weights following = next.first < run.last ? read(next) : then;
                Fetching fetching(following, a_.reading, Format::kCachedShift, products, panel_bytes_,
                                  reads_once() ? kReadAhead : 0);
                int64_t tile = 0;
                if constexpr (kGatedTiles > 1)
                    for (; run.layer->gate_weight && tile + 1 < tiles.count; tile += kGatedTiles)
                        gated_tiles(visit, row, tiles, tile, std::min(tile + kGatedTiles, tiles.count), fetching);
                for (; tile < tiles.count; ++tile)
                    block(visit, row + tiles.begin(tile), tiles.size(tile), tiles.count > 1, fetching);
            }
        });
    }

    // As many rows as the cache holds. Of few, threads share out the panels, and every weight is read once for each part. Of
    // many, each thread takes rows of its own, which no other core has touched then.
    EvenParts row_parts() const {
        const auto row_bytes = static_cast<int64_t>(stride_ * sizeof(Left));
        if (shares_panels()) return EvenParts(a_.rows, std::max<int64_t>(kSharedRowBytes / row_bytes, Format::kRowsApart));
        const int64_t held = std::max<int64_t>(Format::kHeldRowBytes / row_bytes, Format::kRowsApart);
        const int64_t parts_each = divide_up(divide_up(a_.rows, threads_), held);
        return EvenParts(a_.rows, divide_up(a_.rows, parts_each * threads_));
    }

    bool shares_panels() const { return a_.rows < threads_ * Format::kRowsApart; }

    // A run of panels, for a part of the rows.
    struct Place {
        Run run;
        int64_t part;
    };
    Place place_of(int64_t unit, int64_t parts) const {
        const int64_t runs = shares_panels() ? runs_each_ : runs_each_ * threads_;  // for each part
        const int64_t first = unit / (runs * parts) * runs;                         // of those of a worker
        return {run_at(first + unit % runs), unit % (runs * parts) / runs};
    }

    // How many runs of a layer each worker has.
    int64_t runs_of(const LinearLayer& layer) const {
        const int64_t each = divide_up(divide_up(layer.outputs, kPanel), threads_);
        const int64_t most = std::max<int64_t>(kRunBytes / (panel_bytes_ * matrices(layer)), 1);
        return std::max<int64_t>(divide_up(each, most), std::min<int64_t>(each, 2));
    }

    // Runs of all layers, in the order in which workers take them: for each the same number, its share of every layer.
    Run run_at(int64_t index) const {
        const int64_t worker = index / runs_each_;
        int64_t i = index % runs_each_;
        const LinearLayer* layer = a_.layers;
        for (; i >= runs_of(*layer); ++layer) i -= runs_of(*layer);
        const int64_t panels = divide_up(layer->outputs, kPanel), count = runs_of(*layer);
        const int64_t first = panels * worker / threads_;
        const int64_t share = panels * (worker + 1) / threads_ - first;
        return {layer, first + share * i / count, first + share * (i + 1) / count};
    }

    Run first_visit(const Run& run) const { return next_visit(run, {run.layer, run.first, run.first}); }

    // Few rows read every panel only once and wait for memory, which likes long runs.
    bool reads_once() const { return a_.rows <= Format::kOnceRows; }

    // The panels behind those of `visit`; none at the end.
    Run next_visit(const Run& run, const Run& visit) const {
        const int64_t held = std::max<int64_t>(kVisitBytes / (panel_bytes_ * matrices(*run.layer)), 1);
        const int64_t most = reads_once() ? run.last : held;
        return {run.layer, visit.last, std::min(visit.last + most, run.last)};
    }

    Weights read(const Run& run) const {
        const auto at = [&](const void* weight) {
            return weight ? static_cast<const std::byte*>(weight) + run.first * panel_bytes_ : nullptr;
        };
        return {at(run.layer->weight), at(run.layer->gate_weight), (run.last - run.first) * panel_bytes_};
    }
    Weights first_read(const Run& run) const { return read(first_visit(run)); }

    // What a worker begins with.
    Run first_visit_of(int worker) const {
        const int64_t parts = row_parts().count;
        return first_visit(place_of(first_unit(worker, runs_each_ * threads_ * parts, threads_), parts).run);
    }

    // What this worker reads first in the operator that comes next.
    static Weights read_behind(const std::optional<Linear>& next, int worker) {
        if (!next || worker >= next->threads_) return {};
        return next->read(next->first_visit_of(worker));
    }

    static int64_t half(const Run& visit) { return (visit.last - visit.first) / 2; }

    // A visit of rows [row, row + count). Few rows take two panels at once, to keep the multipliers busy: one of each
    // half, so that both are read on and on to the end.
    void block(const Run& visit, int64_t row, int64_t count, bool again, Fetching& fetching) const {
        int64_t panel = visit.first;
        if constexpr (Format::kWideRows > 0)
            if (count <= Format::kWideRows)
                with_rows<Format::kWideRows, step_of<4>()>(count, [&](auto height) {
                    const int64_t middle = visit.first + half(visit);
                    for (; panel < middle; ++panel)
                        tile<height, 4>(*visit.layer, row, count, panel, half(visit), again, fetching);
                    panel = middle + half(visit);
                });
        with_rows<Format::kRows, step_of<2>()>(count, [&](auto height) {
            for (; panel < visit.last; ++panel) tile<height, 2>(*visit.layer, row, count, panel, 0, again, fetching);
        });
    }

    // Of the panel, and for four vectors of the one that is `apart` panels behind it. Computes Rows rows, `count` of which
    // are wanted.
    template <int Rows, int Vectors>
    void tile(const LinearLayer& layer, int64_t row, int64_t count, int64_t panel, int64_t apart, bool again,
              Fetching& fetching) const {
        constexpr int kColumns = Vectors * 16;
        alignas(64) float sums[Rows * kColumns], gate[Rows * kColumns];
        if (layer.residual) fetch_residual<Vectors>(layer, row, count, panel, apart);
        if (layer.gate_weight) multiply<Rows, Vectors>(layer.gate_weight, row, count, panel, apart, again, fetching, gate);
        multiply<Rows, Vectors>(layer.weight, row, count, panel, apart, again, fetching, sums);
        for (int64_t begin = 0; begin < kColumns; begin += kPanel, panel += apart)
            finish_tile(layer, place_of_tile(layer, row, count, panel), sums + begin, gate + begin, kColumns);
    }

    // Tiles [begin, end) of a layer with a gate: all with a panel of the gate, which stays in the nearest cache meanwhile, and
    // then all with the one of the layer.
    void gated_tiles(const Run& visit, int64_t row, const EvenParts& tiles, int64_t begin, int64_t end,
                     Fetching& fetching) const {
        const LinearLayer& layer = *visit.layer;
        alignas(64) float gates[kGatedTiles][Format::kRows * kPanel], sums[Format::kRows * kPanel];
        const auto multiply_tile = [&](const void* weight, int64_t tile, int64_t panel, float* out) {
            with_rows<Format::kRows, step_of<2>()>(tiles.size(tile), [&](auto height) {
                multiply<height, 2>(weight, row + tiles.begin(tile), tiles.size(tile), panel, 0, true, fetching, out);
            });
        };
        for (int64_t panel = visit.first; panel < visit.last; ++panel) {
            for (int64_t tile = begin; tile < end; ++tile) multiply_tile(layer.gate_weight, tile, panel, gates[tile - begin]);
            for (int64_t tile = begin; tile < end; ++tile) {
                const TilePlace place = place_of_tile(layer, row + tiles.begin(tile), tiles.size(tile), panel);
                if (layer.residual) fetch_residual<2>(layer, place.row, place.rows, panel, 0);
                multiply_tile(layer.weight, tile, panel, sums);
                finish_tile(layer, place, sums, gates[tile - begin], kPanel);
            }
        }
    }

    // Some rows at a time; see finish.
    static void finish_tile(const LinearLayer& layer, TilePlace rest, const float* sums, const float* gate, int64_t stride) {
        while (rest.rows > 0) {
            const int64_t rows = std::min<int64_t>(rest.rows, Format::kFinishedRows);
            finish(layer, {rest.row, rows, rest.column, rest.columns}, sums, gate, stride);
            Format::between_products();
            rest.row += rows;
            rest.rows -= rows;
            sums += rows * stride;
            gate += rows * stride;
        }
    }

    static TilePlace place_of_tile(const LinearLayer& layer, int64_t row, int64_t count, int64_t panel) {
        const int64_t column = panel * kPanel;
        return {row, count, column, std::min<int64_t>(kPanel, layer.outputs - column)};
    }

    template <int Rows, int Vectors>
    void multiply(const void* weight, int64_t row, int64_t count, int64_t panel, int64_t apart, bool again,
                  Fetching& fetching, float* out) const {
        const auto* first = static_cast<const std::byte*>(weight) + panel * panel_bytes_;
        product<Rows, Vectors>(left_ + row * stride_, count, first, apart * panel_bytes_, again, fetching.part(first), out);
    }

    // What a tile's sums are added to: it may be in another core's cache.
    template <int Vectors>
    static PELLUCID_INLINE void fetch_residual(const LinearLayer& layer, int64_t row, int64_t count, int64_t panel,
                                               int64_t apart) {
        for (int64_t r = 0; r < count; ++r)
            for (int v = 0; v < Vectors; ++v)
                prefetch(layer.residual + (row + r) * layer.outputs + (panel + v / 2 * apart) * kPanel + v % 2 * 16);
    }

    // out [Rows, Vectors * 16]
    template <int Rows, int Vectors>
    __attribute__((noinline)) void product(const Left* left, int64_t count, const std::byte* panel, int64_t apart,
                                           bool again, const Ahead& ahead, float* out) const {
        if constexpr (step_of<Vectors>() > 1)
            Format::template multiply_tiles<Rows, Vectors>(left, stride_, count, panel, apart, a_.inputs, again, ahead, out);
        else
            multiply_in_registers<Rows, Vectors>(left, panel, apart, ahead, out);
    }

    template <int Rows, int Vectors>
    PELLUCID_INLINE void multiply_in_registers(const Left* left, const std::byte* panel, int64_t apart, const Ahead& ahead,
                                               float* out) const {
        F16 sums[Rows][Vectors];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = broadcast(0.0f);
        Format::multiply(left, stride_, panel, apart, a_.inputs, ahead, sums);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(out + (r * Vectors + v) * 16, sums[r][v]);
    }

    static constexpr int64_t kGatedTiles = Format::kStep > 1 ? 128 / Format::kRows : 1;
    static constexpr int64_t kPrepareWork = 12;          // of a number, which comes from another core maybe
    static constexpr int64_t kReadAhead = 6 << 10;       // bytes
    static constexpr int64_t kRunBytes = 512 << 10;      // of a run, about
    static constexpr int64_t kVisitBytes = 20 << 10;     // of panels in the nearest cache, at least one
    static constexpr int64_t kSharedRowBytes = 1 << 20;  // of prepared rows in the next cache, where threads share panels

    const LinearArguments& a_;
    const int64_t stride_, panel_bytes_;
    int threads_;
    int64_t runs_each_ = 0;  // of a worker
    const Left* left_ = nullptr;
};

// call(format), of the arguments' format.
template <class Call>
auto with_format(const LinearArguments& arguments, const Call& call) {
    switch (arguments.format) {
#if defined(PELLUCID_AMX)
        case kBfloat16: return call(TiledBfloat16Format());
        case kInt8: return arguments.inputs <= TiledInt8Format::kMostInputs ? call(TiledInt8Format()) : call(Int8Format());
        case kInt4: return arguments.rows > kFewInt4Rows ? call(TiledInt4Format()) : call(Int4Format());
#else
        case kBfloat16: return call(Bfloat16Format());
        case kInt8: return call(Int8Format());
        case kInt4: return call(Int4Format());
#endif
        default: return call(Float32Format());
    }
}

void run(const LinearArguments& arguments) {
    with_format(arguments, [&](auto format) { Linear<decltype(format)>(arguments).run(); });
}

void run_plain(WeightFormat format, const float* x, const void* weight, const float* bias, float* out, int64_t rows,
               int64_t inputs, int64_t outputs, int threads) {
    const LinearLayer layer{weight, bias, nullptr, nullptr, nullptr, out, outputs, 0, kNoActivation};
    run({x, nullptr, nullptr, &layer, 1, rows, inputs, 0.0f, kNoNorm, format, threads, 0, nullptr, nullptr, nullptr});
}

}  // namespace

int64_t prepared_bytes(const LinearArguments& arguments) {
    return with_format(arguments, [&](auto format) { return Linear<decltype(format)>::prepared_bytes(arguments); });
}

int64_t rounded_stride(int64_t width) {
#if defined(PELLUCID_AMX)
    using Format = TiledBfloat16Format;
#else
    using Format = Bfloat16Format;
#endif
    return std::is_same_v<Format::Left, bf16> && width % 32 == 0 ? Format::left_per_row(width) : 0;
}

FirstWeights first_weights(const LinearArguments& arguments, int worker) {
    return with_format(arguments, [&](auto format) { return Linear<decltype(format)>(arguments).first_weights(worker); });
}

}  // namespace pellucid

using namespace pellucid;

// x [rows, inputs], weight packed, bias [outputs] or null, out [rows, outputs].
extern "C" void pellucid_linear_float32(const float* x, const void* weight, const float* bias, float* out,
                                        int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    run_plain(kFloat32, x, weight, bias, out, rows, inputs, outputs, threads);
}

extern "C" void pellucid_linear_bfloat16(const float* x, const void* weight, const float* bias, float* out,
                                         int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    run_plain(kBfloat16, x, weight, bias, out, rows, inputs, outputs, threads);
}

extern "C" void pellucid_linear_int8(const float* x, const void* weight, const float* bias, float* out, int64_t rows,
                                     int64_t inputs, int64_t outputs, int threads) {
    run_plain(kInt8, x, weight, bias, out, rows, inputs, outputs, threads);
}

extern "C" void pellucid_linear_int4(const float* x, const void* weight, const float* bias, float* out, int64_t rows,
                                     int64_t inputs, int64_t outputs, int threads) {
    run_plain(kInt4, x, weight, bias, out, rows, inputs, outputs, threads);
}

extern "C" int64_t pellucid_rounded_stride(int64_t width) { return rounded_stride(width); }

extern "C" void pellucid_fused_linear(const LinearArguments* arguments) { run(*arguments); }
