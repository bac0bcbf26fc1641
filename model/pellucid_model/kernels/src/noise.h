// The noise of a draw: sampler_reference.py's gumbel_noise, and a bound on it that needs no logarithm.
#pragma once

#include <cmath>
#include <cstdint>

namespace pellucid {
namespace {

// First word of Philox4x32-10.
inline uint32_t philox_word(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t k0, uint32_t k1) {
    uint32_t c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(product1);
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

inline double gumbel(uint32_t word) {
    const double uniform = (word + 0.5) * 0x1p-32;
    return -std::log(-std::log(uniform));
}

// ceiling[word >> 22] is at least the noise of that word, so that most words need no logarithm. The margin is far
// above the rounding of log, and a ceiling that is too high costs time only.
struct NoiseCeiling {
    double ceiling[1024];
    NoiseCeiling() {
        for (uint32_t i = 0; i < 1024; ++i) ceiling[i] = gumbel((i << 22) | 0x3FFFFF) + 1e-9;
    }
    double operator()(uint32_t word) const { return ceiling[word >> 22]; }
};
const NoiseCeiling noise_ceiling;

}  // namespace
}  // namespace pellucid
