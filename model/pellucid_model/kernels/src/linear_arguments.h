// What the fused operator takes: one or several linear layers of the same x, with what stands before and after them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pellucid {

class CacheReading;

enum WeightFormat : int32_t { kFloat32, kBfloat16, kInt8, kInt4 };
enum Norm : int32_t { kNoNorm, kRmsNorm, kLayerNorm };
enum ActivationKind : int32_t { kNoActivation, kRelu, kGelu, kGeluTanh, kSilu };

// y = weight x + bias; then activation(y), or with a gate activation(gate_weight x + gate_bias) y; then residual + that.
struct LinearLayer {
    const void* weight;
    const float* bias;        // [outputs] or null
    const void* gate_weight;  // of the same shape, or null
    const float* gate_bias;
    const float* residual;  // [rows, outputs] or null; may be `out` where there is no gate
    float* out;             // [rows, outputs], never x; or rows of bfloat16
    int64_t outputs;
    int64_t rounded_stride;  // of those, from one to the next, in numbers; 0: out is float32
    int32_t activation;  // of the gate where there is one
};

struct LinearArguments {
    const float* x;  // [rows, inputs], or rows of bfloat16
    const float *norm_weight, *norm_bias;  // [inputs] or null
    const LinearLayer* layers;
    int64_t layer_count, rows, inputs;
    float norm_epsilon;
    int32_t norm;    // of x, before all layers
    int32_t format;  // of all their weights
    int32_t threads;
    int32_t is_rounded;  // x is; weights are bfloat16 then, and there is no norm
    const LinearArguments* next;  // the operator whose weights are read after this one's, or null
    CacheReading* reading;        // what this thread fetches of the cache meanwhile; or null
    void* prepared;  // what a team shares to prepare rows in: prepared_bytes; null: there is no team
};

int64_t prepared_bytes(const LinearArguments& arguments);

// The distance between rows of bfloat16 that layers take as they are, instead of rounding float32 to the same: in numbers, 0
// where they take none of that width. Rows begin at whole lines of the cache, and a layer may read some behind the last one.
int64_t rounded_stride(int64_t width);
constexpr int64_t kRowsBehind = 31;

// Where thread `worker` begins to read the weights, in two places where it reads them side by side, else in the same. Null
// where there are more rows than wait for memory.
struct FirstWeights {
    const std::byte *first = nullptr, *second = nullptr;
};
FirstWeights first_weights(const LinearArguments& arguments, int worker);

}  // namespace pellucid
