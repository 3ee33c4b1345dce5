#include "quantize/dequantize.h"
#include "quantize/tile_device.cuh"

namespace transformer_plugin::quantize {
namespace {

// Rounded to nearest even; a NaN is the one quiet NaN that the CPU writes too.
template <typename T>
__device__ __forceinline__ T round_to(float value) {
  if (value == value) return from_float<T>(value);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __ushort_as_bfloat16(0x7fc0);
  if constexpr (std::is_same_v<T, __half>) return __ushort_as_half(0x7e00);
  if constexpr (std::is_same_v<T, float>) return __uint_as_float(0x7fc00000u);
}

// Transposed data of the tile into shared memory, a line at a time.
__device__ __forceinline__ void load_columns(const DequantizeArgs& args, const Tile& tile, int warp, int lane,
                                             TransposedTile& turned) {
  const Layout& layout = args.layout;
  for (int column = warp; column < tile.cols; column += kWarps) {
    const uint8_t* source =
        args.data + (tile.member * layout.cols + tile.col + column) * layout.rows + tile.row + lane * 4;
    turned.at(column, lane) = load_codes(source, tile.rows - lane * 4, is_word_aligned(source)).word;
  }
  __syncthreads();
}

// The codes of one row of the thread's columns.
__device__ __forceinline__ Codes4 row_codes(const DequantizeArgs& args, const Tile& tile, int row, int c0,
                                            TransposedTile& turned) {
  const Layout& layout = args.layout;
  if (!args.transposed) {
    const uint8_t* source =
        args.data + (tile.member * layout.rows + tile.row + row) * layout.cols + tile.col + c0;
    return load_codes(source, tile.cols - c0, is_word_aligned(source));
  }
  Codes4 codes;
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    if (c0 + c < tile.cols) codes.set(c, static_cast<uint8_t>(turned.at(c0 + c, row / 4) >> (8 * (row % 4))));
  }
  return codes;
}

// Both element types are exact in half precision, to which the hardware converts two codes at once.
template <DType element>
__device__ __forceinline__ float2 decode2(uint32_t codes) {
  constexpr __nv_fp8_interpretation_t type = element == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), type)));
}

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  __shared__ TransposedTile turned;
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int c0 = lane * kColsPerThread;
  const int first_row = warp * kRowsPerThread;
  const Tile tile = block_tile(layout);
  if (args.transposed && !tile.tail) load_columns(args, tile, warp, lane, turned);
  const int count = tile.cols - c0;
  if (first_row >= tile.rows || count <= 0) return;

  Codes4 codes[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (first_row + r < tile.rows && !tile.tail) codes[r] = row_codes(args, tile, first_row + r, c0, turned);
  }
  // Scales of transposed data belong to columns and do not change over a thread's rows; others belong to rows.
  float scales[kColsPerThread] = {};
  if (args.transposed && !tile.tail) {
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      if (c < count) scales[c] = scale_at(args, tile, first_row, c0 + c);
    }
  }
  const bool whole = count >= kColsPerThread && layout.cols % kColsPerThread == 0 &&
                     reinterpret_cast<uintptr_t>(args.output) % (kColsPerThread * sizeof(T)) == 0;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = first_row + r;
    if (row >= tile.rows) break;
    if (!args.transposed && !tile.tail) {
      const float scale = scale_at(args, tile, row, c0);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) scales[c] = scale;
    }
    const float2 low = decode2<element>(codes[r].word & 0xffffu),
                 high = decode2<element>(codes[r].word >> 16);
    const T values[kColsPerThread] = {round_to<T>(low.x * scales[0]), round_to<T>(low.y * scales[1]),
                                      round_to<T>(high.x * scales[2]), round_to<T>(high.y * scales[3])};
    T* output = static_cast<T*>(args.output) + (tile.member * layout.rows + tile.row + row) * layout.cols +
                tile.col + c0;
    if (whole) {
      using Vector = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
      Vector vector;
      memcpy(&vector, values, sizeof(vector));
      *reinterpret_cast<Vector*>(output) = vector;
    } else {
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        if (c < count) output[c] = values[c];
      }
    }
  }
}

}  // namespace

void launch_dequantize(const DequantizeArgs& args, void* stream) {
  const unsigned grid = tile_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      dequantize_kernel<decltype(type), decltype(element)::value>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    });
  });
  check_launch("dequantize_kernel");
}

}  // namespace transformer_plugin::quantize
