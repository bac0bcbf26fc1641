// The register tile that every matrix product here is made of, but for those of AMX (amx.h).
//
//     sums[r][v] += left(r, k) * right(k, v)      for k = begin, begin + 1, …, end - 1
//
// Each of the Rows x Vectors x 16 outputs is one chain of accumulations in ascending k. It is the same chain whatever
// the tile's height and width, which is what makes the operators independent of batch and chunk sizes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace pellucid {
namespace {

// Product supplies left(r, k), right(k, v) and multiply_add(left, right, sum).
template <class Product, class Sum, int Rows, int Vectors>
PELLUCID_INLINE void accumulate(const Product& product, int64_t begin, int64_t end, Sum (&sums)[Rows][Vectors]) {
    for (int64_t k = begin; k < end; ++k) {
        decltype(product.right(k, 0)) right[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) right[v] = product.right(k, v);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const auto left = product.left(r, k);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = product.multiply_add(left, right[v], sums[r][v]);
        }
    }
}

// Calls body with `rows`, rounded up to a multiple of Step, as a compile-time constant, 1 <= rows <= Most.
template <int Most, int Step = 1, class Body>
PELLUCID_INLINE void with_rows(int64_t rows, const Body& body) {
    static_assert(Most % Step == 0);
    if constexpr (Most == Step) {
        body(std::integral_constant<int, Most>{});
    } else {
        if (rows > Most - Step)
            body(std::integral_constant<int, Most>{});
        else
            with_rows<Most - Step, Step>(rows, body);
    }
}

}  // namespace
}  // namespace pellucid
