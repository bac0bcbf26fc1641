// Operators that work on one row, or one number, at a time: norms, look-ups, functions of single numbers. float32.
#include "parallel.h"
#include "row_functions.h"
#include "tables.h"

namespace pellucid {
namespace {

template <class Function>
void map(const float* x, float* out, int64_t size, int threads) {
    constexpr int64_t kChunk = 4096;
    for_each_row(threads, (size + kChunk - 1) / kChunk, 8 * kChunk, [=](int64_t chunk) {
        const int64_t offset = chunk * kChunk;
        for_each_vector(std::min(kChunk, size - offset), [=](int64_t i, auto count) {
            store(out + offset + i, Function()(load(x + offset + i, count)), count);
        });
    });
}

}  // namespace
}  // namespace pellucid

using namespace pellucid;

// x, out [rows, size]; weight [size] or null.
extern "C" void pellucid_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t size,
                                  float eps, int threads) {
    for_each_row(threads, rows, size,
                 [=](int64_t row) { rms_norm_row(x + row * size, weight, out + row * size, size, eps); });
}

// x, out [rows, size]; weight, bias [size] or null.
extern "C" void pellucid_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                                    int64_t size, float eps, int threads) {
    for_each_row(threads, rows, size,
                 [=](int64_t row) { layer_norm_row(x + row * size, weight, bias, out + row * size, size, eps); });
}

extern "C" void pellucid_relu(const float* x, float* out, int64_t size, int threads) {
    map<Relu>(x, out, size, threads);
}

extern "C" void pellucid_silu(const float* x, float* out, int64_t size, int threads) {
    map<Silu>(x, out, size, threads);
}

extern "C" void pellucid_gelu(const float* x, float* out, int64_t size, int threads) {
    map<Gelu>(x, out, size, threads);
}

extern "C" void pellucid_gelu_tanh(const float* x, float* out, int64_t size, int threads) {
    map<GeluTanh>(x, out, size, threads);
}

extern "C" void pellucid_tanh(const float* x, float* out, int64_t size, int threads) {
    map<Tanh>(x, out, size, threads);
}

extern "C" void pellucid_sigmoid(const float* x, float* out, int64_t size, int threads) {
    map<Sigmoid>(x, out, size, threads);
}

extern "C" void pellucid_exp(const float* x, float* out, int64_t size, int threads) {
    map<Exp>(x, out, size, threads);
}

extern "C" void pellucid_sqrt(const float* x, float* out, int64_t size, int threads) {
    map<SquareRoot>(x, out, size, threads);
}

extern "C" void pellucid_absolute(const float* x, float* out, int64_t size, int threads) {
    map<Absolute>(x, out, size, threads);
}

extern "C" void pellucid_reciprocal(const float* x, float* out, int64_t size, int threads) {
    map<Reciprocal>(x, out, size, threads);
}

// out [rows, width] = rows of a table [count, width]; every index is in [0, count).
extern "C" void pellucid_look_up(const void* table, int format, const int64_t* indices, float* out, int64_t rows,
                                 int64_t width, int threads) {
    for_each_row(threads, rows, width,
                 [=](int64_t row) { look_up_row(table, format, indices[row], out + row * width, width); });
}
