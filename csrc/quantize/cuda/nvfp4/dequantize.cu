// Dequantizes NVFP4 data in either direction to FP32, BF16 or FP16 (formula: quantize/args/quantize_nv.h).
// Data: [matrices, rows, cols / 2], or [matrices, cols, rows / 2] if transposed. Grid: block_grid(layout)
// blocks of 256 threads; a block loops over tiles of 128x128. Warp w holds rows 16w .. 16w + 15, lane l
// columns 4l .. 4l + 3. No shared memory.
#include "quantize/cuda/dequantize/common.cuh"

namespace transformer_plugin::quantize {
namespace {

// A thread's elements of row-wise data: 4 in 16 bits for each of its rows.
__device__ __forceinline__ void load_nv_rows(const DequantizeArgs& args, const Tile& tile, int first_row,
                                             int c0, uint32_t (&nibbles)[kRowsPerThread],
                                             float (&factors)[kRowsPerThread]) {
  const Layout& layout = args.layout;
  const uint8_t* scales = static_cast<const uint8_t*>(args.scale);
  const int block = c0 / kNvBlock;
  // True in most calls.
  const bool word_aligned = reinterpret_cast<uintptr_t>(args.data) % sizeof(uint16_t) == 0;
  const ScaleWords words(layout, tile, false);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = first_row + r;
    nibbles[r] = 0;
    factors[r] = 0.0f;
    if (row >= tile.rows) continue;
    const int64_t first = (tile.matrix * layout.rows + tile.row + row) * layout.cols + tile.col + c0;
    const uint8_t* source = args.data + first / 2;
    nibbles[r] =
        word_aligned ? *reinterpret_cast<const uint16_t*>(source) : load_bytes(source, 2, false).word;
    factors[r] = nv_factor(args, tile, row, scales[words.at(row, block / 4) + block % 4]);
  }
}

// A thread's elements of transposed data: 16 rows of each column, which begin in the middle of a byte if a
// group does.
__device__ __forceinline__ void load_nv_columns(const DequantizeArgs& args, const Tile& tile, int first_row,
                                                int c0, uint32_t (&nibbles)[kRowsPerThread],
                                                float (&factors)[kColsPerThread]) {
  const Layout& layout = args.layout;
  const uint8_t* scales = static_cast<const uint8_t*>(args.scale);
  const int block = first_row / kNvBlock;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) nibbles[r] = 0;
  const ScaleWords words(layout, tile, true);
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    factors[c] = 0.0f;
    if (c0 + c >= tile.cols) continue;
    factors[c] = nv_factor(args, tile, c0 + c, scales[words.at(c0 + c, block / 4) + block % 4]);
    const int64_t first =
        (tile.matrix * layout.cols + tile.col + c0 + c) * layout.rows + tile.row + first_row;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (first_row + r >= tile.rows) continue;
      const int64_t element = first + r;
      nibbles[r] |= ((args.data[element / 2] >> (4 * (element % 2))) & 15u) << (4 * c);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_nv_kernel(const __grid_constant__ DequantizeArgs args) {
  const int first_row = threadIdx.x / kWarpSize * kRowsPerThread;
  const int c0 = threadIdx.x % kWarpSize * kColsPerThread;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (first_row >= tile.rows || c0 >= tile.cols) return;
    uint32_t nibbles[kRowsPerThread] = {};
    float of_rows[kRowsPerThread] = {}, of_columns[kColsPerThread] = {};
    if (!tile.tail && !args.transposed) load_nv_rows(args, tile, first_row, c0, nibbles, of_rows);
    if (!tile.tail && args.transposed) load_nv_columns(args, tile, first_row, c0, nibbles, of_columns);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (first_row + r >= tile.rows) break;
      float values[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        values[c] =
            e2m1_to_float((nibbles[r] >> (4 * c)) & 15u) * (args.transposed ? of_columns[c] : of_rows[r]);
      }
      store_row<T>(args, tile, first_row + r, c0, values[0], values[1], values[2], values[3]);
    }
  });
}

}  // namespace

void launch_dequantize_nv(const DequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(args.dtype, [&](auto type) {
    dequantize_nv_kernel<decltype(type)><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("dequantize_nv_kernel");
}

}  // namespace transformer_plugin::quantize
