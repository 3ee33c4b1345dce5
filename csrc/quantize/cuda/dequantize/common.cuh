// Shared by the dequantize kernels: decoding, rounding and storing values.
#pragma once

#include "quantize/args/dequantize.h"
#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// Rounds to nearest even; every NaN becomes the quiet NaN that the CPU kernels write too.
template <typename T>
__device__ __forceinline__ T round_to(float value) {
  if (value == value) return from_float<T>(value);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __ushort_as_bfloat16(0x7fc0);
  if constexpr (std::is_same_v<T, __half>) return __ushort_as_half(0x7e00);
  if constexpr (std::is_same_v<T, float>) return __uint_as_float(0x7fc00000u);
}

// Both FP8 types are exact in half precision, to which the hardware converts two elements at once.
template <DType element>
__device__ __forceinline__ float2 decode2(uint32_t bytes) {
  constexpr __nv_fp8_interpretation_t type = element == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), type)));
}

// The scales of a row of the tile: the bits of one float, or four E8M0 bytes.
__device__ __forceinline__ uint32_t row_scales(const DequantizeArgs& args, const Tile& tile, int row) {
  if (args.layout.granularity != ScaleGranularity::k1x32)
    return __float_as_uint(scale_at(args, tile, row, 0));
  const uint8_t* word =
      static_cast<const uint8_t*>(args.scale) + ScaleWords(args.layout, tile, false).at(row);
  return load_bytes(word, kMxBlocksPerRow, is_word_aligned(word)).word;
}

// Stores four values of a row, in one store if alignment allows.
template <typename T>
__device__ __forceinline__ void store_row(const DequantizeArgs& args, const Tile& tile, int row, int c0,
                                          float a, float b, float c, float d) {
  const Layout& layout = args.layout;
  const int count = tile.cols - c0;
  const T values[kColsPerThread] = {round_to<T>(a), round_to<T>(b), round_to<T>(c), round_to<T>(d)};
  T* output = static_cast<T*>(args.output) + (tile.matrix * layout.rows + tile.row + row) * layout.cols +
              tile.col + c0;
  const bool whole = count >= kColsPerThread && layout.cols % kColsPerThread == 0 &&
                     reinterpret_cast<uintptr_t>(args.output) % (kColsPerThread * sizeof(T)) == 0;
  if (whole) {
    using Vector = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
    Vector vector;
    memcpy(&vector, values, sizeof(vector));
    *reinterpret_cast<Vector*>(output) = vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < kColsPerThread; ++i) {
    if (i < count) output[i] = values[i];
  }
}

}  // namespace transformer_plugin::quantize
