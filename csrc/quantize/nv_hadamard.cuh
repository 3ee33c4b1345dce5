// The random Hadamard transform of 16 values that a thread holds, and which threads hold what is transformed.
#pragma once

#include "quantize/quantize_device.cuh"
#include "quantize/quantize_nv.h"

namespace transformer_plugin::quantize {

// 16 neighbours.
template <typename T>
using NvPairs = Two<T>[kNvBlock / 2];

// Whether a warp's rows are one block of transposed data: they may be less at the end of the matrix or of a group, and
// are none where a group does not begin with a block (quantize_nv.h).
__device__ __forceinline__ bool is_block(const Tile& tile, int warp) {
  return tile.row % kNvBlock == 0 && (warp + 1) * kNvBlock <= tile.rows;
}

// Rounded to T. Quarters of 16-bit values are taken on the way into the first sums, where that costs less than at the end:
// they are exact, also the least, so that every sum is the quarter of what it would be. Floats have no room below theirs.
template <typename T>
__device__ __forceinline__ void transform(float (&x)[kNvBlock], NvPairs<T>& pairs) {
  constexpr bool kEarly = sizeof(T) == 2;
  constexpr float kFirst = kEarly ? 0.25f : 1.0f, kLast = kEarly ? 1.0f : 0.25f;
#pragma unroll
  for (int i = 0; i < kNvBlock; i += 2) {
    const float a = nv_is_negated(i) ? -kFirst : kFirst, b = nv_is_negated(i + 1) ? -kFirst : kFirst;
    const float second = x[i + 1] * b;
    x[i + 1] = fmaf(x[i], a, -second);
    x[i] = fmaf(x[i], a, second);
  }
#pragma unroll
  for (int stride = 2; stride < kNvBlock; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < kNvBlock / 2; ++i) {
    pairs[i] = two_from_floats<T>(x[2 * i] * kLast, x[2 * i + 1] * kLast);
  }
}

}  // namespace transformer_plugin::quantize
