// Dequantizes FP8 and MXFP8 data in either direction, with any alignment, to FP32, BF16 or FP16:
//
//   output[row][column] = round(float(q) * scale of its block)
// Data: [matrices, rows, cols], or [matrices, cols, rows] if transposed. Grid: block_grid(layout) blocks of
// 256 threads; a block loops over tiles of 128x128. Warp w holds rows 16w .. 16w + 15, lane l columns 4l ..
// 4l + 3. Transposed data goes through shared memory (a tile of bytes) so that a warp loads whole rows of it.
#include "quantize/cuda/dequantize/common.cuh"
#include "quantize/cuda/tile/visit.cuh"

namespace transformer_plugin::quantize {
namespace {

// Loads transposed data of the tile into shared memory: a warp loads 4 rows of it per step, or one if 16-byte
// loads are not aligned.
__device__ __forceinline__ void load_transposed_rows(const DequantizeArgs& args, const Tile& tile, int warp,
                                                     int lane, TransposedTile& transposed_tile) {
  const auto transposed_rows = TransposedRows::of(args.layout, tile, args.data);
  const uint8_t* source = args.data + transposed_rows.first;
  if (transposed_rows.vectors) {
    constexpr int kLines = kWarpSize / TransposedTile::kChunks;
#pragma unroll
    for (int i = 0; i < kTile / kWarps / kLines; ++i) {
      const int column = (warp * (kTile / kWarps / kLines) + i) * kLines + lane / TransposedTile::kChunks;
      const int chunk = lane % TransposedTile::kChunks;
      if (column < tile.cols) {
        transposed_tile.chunk(column, chunk) =
            *reinterpret_cast<const uint4*>(source + column * transposed_rows.stride + chunk * 16);
      }
    }
  } else {
    for (int column = warp; column < tile.cols; column += kWarps) {
      const uint8_t* transposed_row = source + column * transposed_rows.stride + lane * 4;
      transposed_tile.word(column, lane) =
          load_bytes(transposed_row, tile.rows - lane * 4, is_word_aligned(transposed_row)).word;
    }
  }
  __syncthreads();
}

// A thread's elements, one word of 4 columns per row. Elements past the matrix are undefined.
__device__ __forceinline__ void load_rows(const DequantizeArgs& args, const Tile& tile, int warp, int lane,
                                          TransposedTile& transposed_tile, Bytes4 (&bytes)[kRowsPerThread]) {
  const int first_row = warp * kRowsPerThread, c0 = lane * kColsPerThread;
  if (args.transposed) {
    uint4 columns[kColsPerThread];
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) columns[c] = transposed_tile.chunk(c0 + c, warp);
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      uint32_t of_columns[4], of_rows[4];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) of_columns[c] = (&columns[c].x)[word];
      transpose_4x4(of_columns, of_rows);
#pragma unroll
      for (int r = 0; r < 4; ++r) bytes[4 * word + r].word = of_rows[r];
    }
    return;
  }
  const Layout& layout = args.layout;
  const uint8_t* source =
      args.data + (tile.matrix * layout.rows + tile.row + first_row) * layout.cols + tile.col + c0;
  const bool aligned = layout.cols % 4 == 0 && is_word_aligned(args.data);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (first_row + r < tile.rows) bytes[r] = load_bytes(source + r * layout.cols, tile.cols - c0, aligned);
  }
}

template <typename T, DType element>
__device__ __forceinline__ void dequantize_tile(const DequantizeArgs& args, const Tile& tile,
                                                TransposedTile& transposed_tile) {
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int c0 = lane * kColsPerThread;
  const int first_row = warp * kRowsPerThread;
  if (args.transposed && !tile.tail) load_transposed_rows(args, tile, warp, lane, transposed_tile);
  const int count = tile.cols - c0;  // columns of this lane in the matrix; zero or less past its end
  if (first_row >= tile.rows) return;

  Bytes4 bytes[kRowsPerThread];
  if (!tile.tail) load_rows(args, tile, warp, lane, transposed_tile, bytes);
  // Scales of transposed data belong to columns and are the same for all rows of a thread. Otherwise scales
  // belong to rows, and lane r loads those of row r for the warp.
  uint32_t of_row = 0;
  if (!args.transposed && !tile.tail && lane < kRowsPerThread && first_row + lane < tile.rows) {
    of_row = row_scales(args, tile, first_row + lane);
  }
  float scales[kColsPerThread] = {};
  if (args.transposed && !tile.tail) {
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      if (c < count) scales[c] = scale_at(args, tile, first_row, c0 + c);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = first_row + r;
    if (row >= tile.rows) break;
    if (!args.transposed && !tile.tail) {
      const uint32_t scale_bits = __shfl_sync(0xffffffffu, of_row, r);
      const float scale = layout.granularity == ScaleGranularity::k1x32
                              ? e8m0_to_float(static_cast<uint8_t>(scale_bits >> (8 * (c0 / kMxBlock))))
                              : __uint_as_float(scale_bits);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) scales[c] = scale;
    }
    const float2 low = decode2<element>(bytes[r].word & 0xffffu),
                 high = decode2<element>(bytes[r].word >> 16);
    store_row<T>(args, tile, row, c0, low.x * scales[0], low.y * scales[1], high.x * scales[2],
                 high.y * scales[3]);
  }
}

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  __shared__ TransposedTile transposed_tile;
  for_each_tile(args.layout,
                [&](const Tile& tile) { dequantize_tile<T, element>(args, tile, transposed_tile); });
}

}  // namespace

void launch_dequantize(const DequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0 || launch_dequantize_rows(args, stream)) return;
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    dequantize_kernel<decltype(type), decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("dequantize_kernel");
}

}  // namespace transformer_plugin::quantize
