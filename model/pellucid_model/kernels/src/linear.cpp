// Linear layers over weights packed in panels of 32 output columns: out[T, N] = x[T, K] weight[N, K]^T + bias[N].
//
// A panel is one run of memory, and a tile of the output reads it from its beginning to its end. A format says
//   left_per_row, prepare   what a row of x is turned into, once per call
//   panel_bytes             how long a panel is
//   multiply                the sums of Rows rows by Vectors * 16 columns, the same bits whatever Rows and Vectors are
//   kRows, kWideRows        the most rows of a tile that is one panel wide, and of one that is two panels wide
// Formats: linear_formats.h, quantized_formats.h. What a tile's sums go through on their way out: linear_finish.h.
#include <vector>

#include "linear_finish.h"
#include "parallel.h"
#include "quantized_formats.h"
#include "scratch.h"

namespace pellucid {
namespace {

template <class Format>
class Linear {
    using Left = typename Format::Left;

public:
    explicit Linear(const LinearArguments& arguments)
        : a_(arguments), stride_(Format::left_per_row(a_.inputs)), panel_bytes_(Format::panel_bytes(a_.inputs)) {}

    void run() {
        int64_t outputs = 0;
        for (int64_t i = 0; i < a_.layer_count; ++i) outputs += a_.layers[i].outputs * (a_.layers[i].gate_weight ? 2 : 1);
        const int threads = useful_threads(a_.threads, a_.rows * a_.inputs * outputs);
        left_ = prepare(threads);
        multiply(threads);
    }

private:
    const Left* prepare(int threads) const {
        if constexpr (Format::kTakesFloats)
            if (a_.norm == kNoNorm) return a_.x;
        Left* left = scratch<Left, kPreparedRows>(a_.rows * stride_);
        const EvenParts parts(a_.rows, std::max<int64_t>(1, divide_up(a_.rows, 4 * threads)));
        for_each_unit(useful_threads(threads, a_.rows * a_.inputs * 4), parts.count, [&](int64_t part, int) {
            for (int64_t row = parts.begin(part); row < parts.begin(part) + parts.size(part); ++row)
                Format::prepare(normalised(a_.x + row * a_.inputs), a_.inputs, left + row * stride_);
        });
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

    void multiply(int threads) const {
        const EvenParts tiles(a_.rows, Format::kRows);
        const int64_t row_parts = std::clamp<int64_t>(a_.rows / Format::kRows / 8, 1, 8);
        std::vector<Span> spans;
        for (int64_t i = 0; i < a_.layer_count; ++i) cut(a_.layers[i], threads, spans);
        for_each_unit(threads, static_cast<int64_t>(spans.size()) * row_parts, [&](int64_t unit, int) {
            const Span& span = spans[unit / row_parts];
            const int64_t part = unit % row_parts;
            const int64_t first_tile = tiles.count * part / row_parts, last_tile = tiles.count * (part + 1) / row_parts;
            // Some rows stay in the cache while panels go by; with many, a span of panels stays while rows go by. The
            // fewest wait for memory alone, which likes long runs.
            const bool rows_stay = a_.rows <= kRowsThatStay && a_.rows > Format::kWideRows;
            const int64_t most = rows_stay ? 2 : span.last - span.first;
            Visit visit{span.first, 0, span.last, tiles.count, 0};
            for (; visit.first < span.last; visit.first = visit.last) {
                visit.last = std::min(visit.first + most, span.last);
                for (visit.tile = first_tile; visit.tile < last_tile; ++visit.tile)
                    for (int i = 0; i < span.pass_count; ++i)
                        block(span.passes[i], tiles.begin(visit.tile), tiles.size(visit.tile), visit);
            }
        });
    }

    // Panels [first, last) of a layer, for all rows or a part of them.
    struct Span {
        Pass passes[2];
        int pass_count;
        int64_t first, last;
    };

    void cut(const LinearLayer& layer, int threads, std::vector<Span>& spans) const {
        const int64_t outputs = layer.outputs;
        const Pass gate{layer.gate_weight, layer.gate_bias, nullptr, layer.out, outputs, layer.activation, false};
        Pass own{layer.weight, layer.bias, layer.residual, layer.out, outputs, layer.activation, false};
        Span span{{own}, 1, 0, 0};
        if (layer.gate_weight) {
            own.activation = kNoActivation;
            own.gated = true;
            span = {{gate, own}, 2, 0, 0};
        }
        const int64_t panels = divide_up(outputs, kPanel);
        const int64_t most = panels_per_span(panels, span.pass_count, threads);
        for (; span.first < panels; span.first = span.last) {
            span.last = std::min(span.first + most, panels);
            spans.push_back(span);
        }
    }

    // A long run from memory where weights are used once; what the L2 cache holds where many row tiles use them again.
    int64_t panels_per_span(int64_t panels, int passes, int threads) const {
        const int64_t bytes = (512 << 10) / (a_.rows <= Format::kRows ? 1 : passes);
        return std::clamp<int64_t>(bytes / panel_bytes_, 1, divide_up(panels, 2 * threads));
    }

    // A row tile's turn at panels [first, last), of a span that goes on to `end`; there are `tiles` row tiles in all.
    struct Visit {
        int64_t first, last, end;
        int64_t tiles, tile;
    };

    // Rows [row, row + count). Few rows take two panels at once, to keep the multipliers busy.
    void block(const Pass& pass, int64_t row, int64_t count, const Visit& visit) const {
        int64_t panel = visit.first;
        if (count <= Format::kWideRows)
            with_rows<Format::kWideRows>(count, [&](auto height) {
                for (; panel + 2 <= visit.last; panel += 2) tile<height, 4>(pass, row, panel, {});
            });
        with_rows<Format::kRows>(count, [&](auto height) {
            for (; panel < visit.last; ++panel) tile<height, 2>(pass, row, panel, ahead(pass, panel, visit));
        });
    }

    // The panel that takes this one's place in the next visit is fetched by the first few row tiles, in equal parts.
    Ahead ahead(const Pass& pass, int64_t panel, const Visit& visit) const {
        const auto* weights = static_cast<const std::byte*>(pass.weight);
        const int64_t next = panel + visit.last - visit.first;
        const int shift = std::bit_width(static_cast<uint64_t>(visit.tiles)) - 1;
        const bool has_part = visit.tile < int64_t{1} << shift;
        if (next >= visit.end || !has_part || panel_bytes_ > kMostAhead) return {weights + panel * panel_bytes_, 0};
        return {weights + next * panel_bytes_ + (visit.tile * panel_bytes_ >> shift), shift};
    }

    template <int Rows, int Vectors>
    void tile(const Pass& pass, int64_t row, int64_t panel, const Ahead& ahead) const {
        constexpr int kColumns = Vectors * 16;
        alignas(64) float sums[Rows * kColumns];
        product<Rows, Vectors>(pass.weight, row, panel, ahead, sums);
        const int64_t column = panel * kPanel;
        finish(pass, {row, Rows, column, std::min<int64_t>(kColumns, pass.outputs - column)}, sums, kColumns);
    }

    // out [Rows, Vectors * 16]
    template <int Rows, int Vectors>
    __attribute__((noinline)) void product(const void* weight, int64_t row, int64_t panel, const Ahead& ahead,
                                           float* out) const {
        F16 sums[Rows][Vectors];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = broadcast(0.0f);
        const auto* first = static_cast<const std::byte*>(weight) + panel * panel_bytes_;
        Format::multiply(left_ + row * stride_, stride_, first, panel_bytes_, a_.inputs, ahead, sums);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(out + (r * Vectors + v) * 16, sums[r][v]);
    }

    static constexpr int64_t kRowsThatStay = 64;
    static constexpr int64_t kMostAhead = 192 << 10;  // bytes of a panel, of which the cache holds four

    const LinearArguments& a_;
    const int64_t stride_, panel_bytes_;
    const Left* left_ = nullptr;
};

void run(const LinearArguments& arguments) {
    switch (arguments.format) {
        case kFloat32: return Linear<Float32Format>(arguments).run();
        case kBfloat16: return Linear<Bfloat16Format>(arguments).run();
        case kInt8: return Linear<Int8Format>(arguments).run();
        case kInt4: return Linear<Int4Format>(arguments).run();
    }
}

void run_plain(WeightFormat format, const float* x, const void* weight, const float* bias, float* out, int64_t rows,
               int64_t inputs, int64_t outputs, int threads) {
    const LinearLayer layer{weight, bias, nullptr, nullptr, nullptr, out, outputs, kNoActivation};
    run({x, nullptr, nullptr, &layer, 1, rows, inputs, 0.0f, kNoNorm, format, threads});
}

}  // namespace
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

extern "C" void pellucid_fused_linear(const LinearArguments* arguments) { run(*arguments); }
