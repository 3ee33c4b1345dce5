// An NVFP4 tile of any shape and dtype (formulas: quantize/args/quantize_nv.h). A thread encodes 16 values
// that share a scale: 16 neighbours of a row, or the 16 rows of a column that it holds. With transposed data
// a tile is read once; rows are redistributed within a warp through shared memory. The tail of a ragged
// matrix needs no special case: its values are loaded as zero, whose data and scales are 0.
#pragma once

#include "common/philox.cuh"
#include "quantize/cuda/nvfp4/encode.cuh"

namespace transformer_plugin::quantize {

static_assert(kRowsPerThread == kNvBlock, "a thread holds whole blocks of transposed data");

template <typename T>
struct NvShared {
  static constexpr int kPassRows = sizeof(T) == 2 ? 16 : 8;  // of a warp, redistributed at once
  static constexpr int kPitch = kTile + 16 / sizeof(T);      // so that two rows begin in different banks
  alignas(16) T rows[kWarps][kPassRows][kPitch];
  NvTransposedTile transposed_tile;
  alignas(4) uint8_t scales_t[kNvBlocksPerRow][kTile];
};

// Loads 16 neighbouring values; zero unless `exists`.
template <typename T>
__device__ __forceinline__ void load_block(const T* source, bool exists, NvPairs<T>& pairs) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(NvPairs<T>) / 16); ++i) {
    uint4 vector = {};
    if (exists) vector = reinterpret_cast<const uint4*>(source)[i];
    memcpy(reinterpret_cast<char*>(pairs) + 16 * i, &vector, 16);
  }
}

// `amax` is null in a direction that is not requested.
__device__ __forceinline__ NvGlobal tile_global(const NvArgs& args, const Tile& tile, const float* amax) {
  const bool exists = amax && !args.row_scaled && !tile.tail;
  return nv_global(exists ? amax[tile.group] : 0.0f, args.method);
}

// Common to all row blocks of a thread, which lie in one block column of the tile.
struct NvRows {
  ScaleWords scale_words;
  NvGlobal global;
  int64_t first_line;     // counted over all matrices
  int64_t first_element;  // of the block in it
  uint8_t* data;          // of the first element
  uint8_t* scale;         // of the block in its word
  uint32_t blocks;        // per row of the matrix
  int word;
  bool has_data;
  bool has_scale;

  __device__ __forceinline__ NvRows(const NvArgs& args, const Tile& tile, int block)
      : scale_words(args.layout, tile, false),
        global(tile_global(args, tile, args.rowwise ? args.amax : nullptr)),
        first_line(tile.matrix * args.layout.rows + tile.row),
        first_element(first_line * args.layout.cols + tile.col + block * kNvBlock),
        data(args.data + first_element / 2),
        scale(args.scale + block % 4),
        blocks(static_cast<uint32_t>(args.layout.cols / kNvBlock)),
        word(block / 4),
        has_data(block * kNvBlock < tile.cols),
        has_scale(word < scale_words.count) {}

  // Blocks from the first row to `row`.
  __device__ __forceinline__ int64_t blocks_to(int row) const {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(row)) * blocks);
  }
};

// Encodes and stores a block of a row. With `square_blocks`, `square` is the amax of its 16x16 block.
template <NvEncoding encoding, typename T>
__device__ __forceinline__ void write_row_block(const NvArgs& args, const Tile& tile, const NvRows& rows,
                                                const NvPairs<T>& pairs, int row, bool square_blocks,
                                                float square) {
  NvGlobal global = rows.global;
  if (args.row_scaled) {
    const bool exists = !tile.tail && row < tile.rows;
    global = nv_global(exists ? args.amax[rows.first_line + row] : 0.0f, args.method);
  }
  NvBlockValues values;
  const float check = unpack<T>(pairs, values);
  const float amax = square_blocks ? square : check;
  const int64_t number = (rows.first_element >> kNvBlockShift) + rows.blocks_to(row);
  // A NaN among the values must reach the check; the amax of the 16x16 block may come from another row.
  const float bound = square_blocks && check == check ? square : check;
  const NvBlock result = encode_block<encoding>(args.method, values, amax, bound, global,
                                                block_random<encoding>(args, number, 0));
  if (row >= tile.rows) return;
  if (rows.has_data) reinterpret_cast<uint2*>(rows.data)[rows.blocks_to(row)] = result.data;
  if (rows.has_scale) store_evict_last(rows.scale + rows.scale_words.at(row, rows.word), result.scale);
}

// The amax of the 16x16 block that holds the thread's columns.
template <typename T>
__device__ __forceinline__ float square_amax(const TileFragment<T>& values) {
  const float2 a = values.column_max(0), b = values.column_max(1);
  float largest = fmaxf(fmaxf(a.x, a.y), fmaxf(b.x, b.y));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

template <NvEncoding encoding, typename T>
__device__ __forceinline__ void encode_rows(const NvArgs& args, const Tile& tile, const NvRows& rows,
                                            const TileFragment<T>& values, int warp, int lane, float square,
                                            NvShared<T>& shared) {
  using Shared = NvShared<T>;
  const int block = block_of_lane(lane);
  const int own_row = lane / 4 % 2 + lane / 16 * 2;
  const float of_square = __shfl_sync(0xffffffffu, square, block * (kNvBlock / kColsPerThread));
#pragma unroll
  for (int pass = 0; pass < kRowsPerThread; pass += Shared::kPassRows) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Shared::kPassRows; ++r) {
      Vector4<T> vector;
      memcpy(&vector, values.at[pass + r], sizeof(vector));
      *reinterpret_cast<Vector4<T>*>(&shared.rows[warp][r][lane * kColsPerThread]) = vector;
    }
    __syncwarp();
#pragma unroll 1
    for (int r = own_row; r < Shared::kPassRows; r += kWarpSize / kNvBlocksPerRow) {
      NvPairs<T> pairs;
      load_block<T>(&shared.rows[warp][r][block * kNvBlock], true, pairs);
      write_row_block<encoding, T>(args, tile, rows, pairs, warp * kRowsPerThread + pass + r,
                                   args.layout.square, of_square);
    }
  }
}

// Reads back the values that the thread wrote for its warp, so that they occupy no registers in between.
template <typename T>
__device__ __forceinline__ void take_back(TileFragment<T>& values, int warp, int lane,
                                          const NvShared<T>& shared) {
#pragma unroll
  for (int r = 0; r < NvShared<T>::kPassRows; ++r) {
    const auto vector = *reinterpret_cast<const Vector4<T>*>(&shared.rows[warp][r][lane * kColsPerThread]);
    memcpy(values.at[r], &vector, sizeof(vector));
  }
}

// The maximum of magnitudes of each of the thread's columns over its rows, NaN if one is.
template <typename T>
__device__ __forceinline__ void check_columns(const TileFragment<T>& values,
                                              float (&checks)[kColsPerThread]) {
#pragma unroll
  for (int i = 0; i < kColsPerThread / 2; ++i) {
    Packed2<T> largest = zeros<T>();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) largest = max_abs_nan(largest, values.at[r][i]);
    const float2 two = to_floats(largest);
    checks[2 * i] = fabsf(two.x);
    checks[2 * i + 1] = fabsf(two.y);
  }
}

// The thread's rows of column `c`. `check` is the maximum of their magnitudes; after a transform it becomes
// that of the result.
template <bool hadamard, typename T>
__device__ __forceinline__ void take_column(const TileFragment<T>& values, int c, NvBlockValues& column,
                                            float& check) {
#pragma unroll
  for (int r = 0; r < kNvBlock; ++r) column.at[r] = values.get(r, c);
  if constexpr (hadamard) {
    NvPairs<T> pairs;
    transform<T>(column.at, pairs);
    check = unpack<T>(pairs, column);
  } else {
    column.signs = {signs_of(column.at), signs_of(column.at + 8)};
  }
}

// Common to the thread's columns of a tile.
struct NvColumns {
  ScaleWords scale_words;
  NvGlobal global;
  int64_t first_line;  // counted over all matrices
  uint8_t* data;       // of the first row of transposed data that the thread stores

  __device__ __forceinline__ NvColumns(const NvArgs& args, const Tile& tile)
      : scale_words(args.layout, tile, true),
        global(tile_global(args, tile, args.transposed ? args.amax_t : nullptr)),
        first_line(tile.matrix * args.layout.cols + tile.col),
        data(args.data_t +
             ((first_line + threadIdx.x / kNvBlocksPerRow) * args.layout.rows + first_stored(tile)) / 2 +
             threadIdx.x % kNvBlocksPerRow * (kNvBlock / 2)) {}

  // The first row of the tile that begins 16 rows of the buffer.
  static __device__ __forceinline__ int64_t first_stored(const Tile& tile) {
    return (tile.row + kNvBlock - 1) / kNvBlock * kNvBlock;
  }
};

// Encodes the columns of the tile into shared memory, with their scales.
template <NvEncoding encoding, bool hadamard, typename T>
__device__ __forceinline__ void encode_columns(const NvArgs& args, const Tile& tile, const NvColumns& columns,
                                               const TileFragment<T>& values, int warp, int lane,
                                               float square, NvShared<T>& shared) {
  const Layout& layout = args.layout;
  NvGlobal global = columns.global;
  const bool whole = is_block(tile, warp);
  const uint8_t broken = !tile.tail && warp * kNvBlock < tile.rows ? 0x7f : 0;
  Bytes4 scales;
  float checks[kColsPerThread];
  if constexpr (!hadamard) check_columns(values, checks);
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    const int column = lane * kColsPerThread + c;
    NvBlock result = {{0, 0}, broken};
    if (whole) {
      if (args.row_scaled) {
        const bool exists = !tile.tail && column < tile.cols;
        global =
            nv_global(exists ? args.amax_t[tile.group * layout.cols + tile.col + column] : 0.0f, args.method);
      }
      NvBlockValues x;
      float& check = checks[c];
      take_column<hadamard>(values, c, x, check);
      const float amax = layout.square ? square : check;
      const float bound = layout.square && check == check ? square : check;
      const int64_t first = (columns.first_line + column) * layout.rows + tile.row + warp * kNvBlock;
      result = encode_block<encoding>(args.method, x, amax, bound, global,
                                      block_random<encoding>(args, first >> kNvBlockShift, 1));
    }
    shared.transposed_tile.words[NvTransposedTile::place(column, warp)] = result.data;
    scales.set(c, result.scale);
  }
  *reinterpret_cast<uint32_t*>(&shared.scales_t[warp][lane * kColsPerThread]) = scales.word;
}

// Stores transposed data: 8 lanes store 64 bytes of a row of it. A tile that does not begin with a block
// stores those 16 rows of the buffer that begin in it.
template <typename T>
__device__ __forceinline__ void store_columns(const NvArgs& args, const Tile& tile, const NvColumns& columns,
                                              NvShared<T>& shared) {
  const int block = threadIdx.x % kNvBlocksPerRow;
  const bool broken = tile.row % kNvBlock != 0;
  if (NvColumns::first_stored(tile) - tile.row + block * kNvBlock >= tile.rows) return;
  constexpr int kStep = kThreads / kNvBlocksPerRow;
  int column = threadIdx.x / kNvBlocksPerRow;
  uint8_t* target = columns.data;
  const int64_t stride = kStep / 2 * args.layout.rows;
#pragma unroll
  for (int i = 0; i < kTile / kStep; ++i, column += kStep, target += stride) {
    if (column >= tile.cols) return;
    uint2 data = shared.transposed_tile.words[NvTransposedTile::place(column, block)];
    if (broken) data = {0, 0};
    *reinterpret_cast<uint2*>(target) = data;
  }
}

// Stores the scales of the columns: a thread stores one word of four.
template <typename T>
__device__ __forceinline__ void store_column_scales(const NvArgs& args, const Tile& tile,
                                                    const ScaleWords& scale_words, NvShared<T>& shared) {
  static_assert(kThreads == 2 * kTile, "a thread has one of a line's two words");
  const int column = threadIdx.x / 2, word = threadIdx.x % 2;
  if (column >= tile.cols || word >= scale_words.count) return;
  store_evict_last(args.scale_t + scale_words.at(column, word), column_scales(shared.scales_t, column, word));
}

// Zeroes the padding of scales, and the scales of a tile after the last row tile in use. Returns whether the
// tile holds rows.
__device__ __forceinline__ bool begin_nv_tile(const NvArgs& args, const Tile& tile) {
  zero_nv_padding(args, tile);
  if (tile.rows > 0) return true;
  if (args.transposed) zero_unused_words(args.layout, tile, args.scale_t);
  return false;
}

// Stores data and scales of a tile in the requested directions. Called by all threads of the block.
template <NvEncoding encoding, bool hadamard, typename T>
__device__ __forceinline__ void write_nv_tile(const NvArgs& args, const Tile& tile, TileFragment<T>& values,
                                              int warp, int lane, NvShared<T>& shared) {
  const float square = args.layout.square ? square_amax(values) : 0.0f;
  if (args.rowwise) {
    const NvRows rows(args, tile, block_of_lane(lane));
    encode_rows<encoding>(args, tile, rows, values, warp, lane, square, shared);
    if (args.transposed && sizeof(T) == 2) take_back(values, warp, lane, shared);
  }
  if (!args.transposed) return;
  const NvColumns columns(args, tile);
  encode_columns<encoding, hadamard>(args, tile, columns, values, warp, lane, square, shared);
  __syncthreads();
  store_column_scales(args, tile, columns.scale_words, shared);
  store_columns(args, tile, columns, shared);
}

// Quantizes a tile of the input. Called by all threads of the block.
template <NvEncoding encoding, bool hadamard, typename T>
__device__ __forceinline__ void quantize_nv_tile(const NvArgs& args, const Tile& tile, NvShared<T>& shared) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (!begin_nv_tile(args, tile)) return;
  TileFragment<T> values;
  PlainSource<T>{}.load(args, tile, warp, lane, values);
  write_nv_tile<encoding, hadamard>(args, tile, values, warp, lane, shared);
}

}  // namespace transformer_plugin::quantize
