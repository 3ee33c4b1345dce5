#include "quantize/cuda/dequantize/common.cuh"

namespace transformer_plugin::quantize {
namespace {

// Transposed data of the tile into shared memory, 4 lines a step of a warp, or one where 16 bytes are not aligned.
__device__ __forceinline__ void load_lines(const DequantizeArgs& args, const Tile& tile, int warp, int lane,
                                           TransposedTile& turned) {
  const auto lines = TransposedLines::of(args.layout, tile, args.data);
  const uint8_t* source = args.data + lines.first;
  if (lines.vectors) {
    constexpr int kLines = kWarpSize / TransposedTile::kChunks;
#pragma unroll
    for (int i = 0; i < kTile / kWarps / kLines; ++i) {
      const int column = (warp * (kTile / kWarps / kLines) + i) * kLines + lane / TransposedTile::kChunks;
      const int chunk = lane % TransposedTile::kChunks;
      if (column < tile.cols) {
        turned.chunk(column, chunk) =
            *reinterpret_cast<const uint4*>(source + column * lines.stride + chunk * 16);
      }
    }
  } else {
    for (int column = warp; column < tile.cols; column += kWarps) {
      const uint8_t* line = source + column * lines.stride + lane * 4;
      turned.word(column, lane) = load_codes(line, tile.rows - lane * 4, is_word_aligned(line)).word;
    }
  }
  __syncthreads();
}

// The thread's codes, a word of 4 columns for each of its rows. Those past the matrix are whatever was there.
__device__ __forceinline__ void load_rows(const DequantizeArgs& args, const Tile& tile, int warp, int lane,
                                          TransposedTile& turned, Codes4 (&codes)[kRowsPerThread]) {
  const int first_row = warp * kRowsPerThread, c0 = lane * kColsPerThread;
  if (args.transposed) {
    uint4 columns[kColsPerThread];
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) columns[c] = turned.chunk(c0 + c, warp);
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      uint32_t of_columns[4], of_rows[4];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) of_columns[c] = (&columns[c].x)[word];
      turn4(of_columns, of_rows);
#pragma unroll
      for (int r = 0; r < 4; ++r) codes[4 * word + r].word = of_rows[r];
    }
    return;
  }
  const Layout& layout = args.layout;
  const uint8_t* source =
      args.data + (tile.member * layout.rows + tile.row + first_row) * layout.cols + tile.col + c0;
  const bool aligned = layout.cols % 4 == 0 && is_word_aligned(args.data);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (first_row + r < tile.rows) codes[r] = load_codes(source + r * layout.cols, tile.cols - c0, aligned);
  }
}

template <typename T, DType element>
__device__ __forceinline__ void dequantize_tile(const DequantizeArgs& args, const Tile& tile,
                                                TransposedTile& turned) {
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int c0 = lane * kColsPerThread;
  const int first_row = warp * kRowsPerThread;
  if (args.transposed && !tile.tail) load_lines(args, tile, warp, lane, turned);
  const int count = tile.cols - c0;  // of this lane's columns that exist; none or less past the matrix
  if (first_row >= tile.rows) return;

  Codes4 codes[kRowsPerThread];
  if (!tile.tail) load_rows(args, tile, warp, lane, turned, codes);
  // Scales of transposed data belong to columns and do not change over a thread's rows; others belong to rows, and lane r
  // loads what the 32 lanes need of row r.
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
      const uint32_t held = __shfl_sync(0xffffffffu, of_row, r);
      const float scale = layout.mode == ScaleMode::kMx
                              ? e8m0_to_float(static_cast<uint8_t>(held >> (8 * (c0 / kMxBlock))))
                              : __uint_as_float(held);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) scales[c] = scale;
    }
    const float2 low = decode2<element>(codes[r].word & 0xffffu),
                 high = decode2<element>(codes[r].word >> 16);
    store_row<T>(args, tile, row, c0, low.x * scales[0], low.y * scales[1], high.x * scales[2],
                 high.y * scales[3]);
  }
}

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  __shared__ TransposedTile turned;
  for_each_tile(args.layout, [&](const Tile& tile) { dequantize_tile<T, element>(args, tile, turned); });
}

}  // namespace

void launch_dequantize(const DequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0 || launch_dequantize_rows(args, stream)) return;
  visit_device_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      dequantize_kernel<decltype(type), decltype(element)::value>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    });
  });
  check_launch("dequantize_kernel");
}

}  // namespace transformer_plugin::quantize
