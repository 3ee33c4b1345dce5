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

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  __shared__ TransposedTile turned;
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int c0 = lane * kColsPerThread;
  const Tile tile = tile_at(layout, blockIdx.x);
  if (args.transposed && !tile.tail) load_columns(args, tile, warp, lane, turned);
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = warp * kRowsPerThread + r;
    if (row >= tile.rows) break;
    T* output = static_cast<T*>(args.output) + (tile.member * layout.rows + tile.row + row) * layout.cols +
                tile.col + c0;
    Codes4 codes;
    if (!tile.tail) codes = row_codes(args, tile, row, c0, turned);
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      if (c0 + c >= tile.cols) break;
      const float scale = tile.tail ? 0.0f : scale_at(args, tile, row, c0 + c);
      output[c] = round_to<T>(fp8_to_float<element>(codes.get(c)) * scale);
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
