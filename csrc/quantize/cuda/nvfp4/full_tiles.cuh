// The fast NVFP4 kernel: full tiles of 128x128 of 16-bit values, with transposed data (and optionally
// row-wise data). Partial tiles, 16x16 blocks and row_scaled are left to nvfp4/tile.cuh, which computes the
// same bits. Formulas: quantize/args/quantize_nv.h.
//
// Input: [rows, cols] in BF16 or FP16, rows 16-byte aligned. Grid: (column tiles, row tiles), of a ragged
// matrix half of its row tiles; 256 threads, 4 blocks per multiprocessor. Warp w handles rows 16w .. 16w +
// 15: cp.async copies them to shared memory while global scales and random bits are computed; the warp then
// encodes blocks of its rows, one per lane and step, and then blocks of its columns.
// Shared memory (NvFullTileShared): the tile of input, encoded transposed data, scales of both directions.
// The kernel is limited by instructions, not by memory: about 25 per element that is encoded in both
// directions.
#pragma once

#include "common/philox.cuh"
#include "common/ptx/cp_async.cuh"
#include "quantize/cuda/nvfp4/encode.cuh"

namespace transformer_plugin::quantize {

template <typename T>
struct NvFullTileShared {
  static constexpr int kPitch = kTile + 16 / sizeof(T);  // so that two rows begin in different banks
  alignas(16) T rows[kTile][kPitch];
  NvTransposedTile transposed_tile;
  alignas(4) uint8_t scales[kTile][kNvBlocksPerRow];
  alignas(4) uint8_t scales_t[kNvBlocksPerRow][kTile];
  NvGlobal globals[2];  // of the rows, and of the columns
  PhiloxKeys keys;
};

// Whether quantize_nv_full_tiles_kernel stores a tile, for a matrix with supports_full_tiles.
__device__ __forceinline__ bool is_full_tile(const Tile& tile) {
  return tile.rows == kTile && tile.cols == kTile && !tile.tail && tile.row % kNvBlock == 0;
}

inline bool supports_full_tiles(const NvArgs& args) {
  const Layout& layout = args.layout;
  constexpr int64_t kMostGridRows = 65535, kMostBlocks = int64_t{1} << 32;  // counted in 32 bits
  return args.transposed && !layout.square && !args.row_scaled && layout.matrices == 1 &&
         layout.rows >= kTile && layout.cols >= kTile && layout.cols % (16 / sizeof(uint16_t)) == 0 &&
         layout.row_tiles() <= kMostGridRows && layout.rows * layout.cols / kNvBlock < kMostBlocks &&
         reinterpret_cast<uintptr_t>(args.input) % 16 == 0;
}

// Whether there may be partial tiles, as far as the host knows.
inline bool may_have_partial_tiles(const Layout& layout) {
  return layout.grouped() || layout.rows % kTile != 0 || layout.cols % kTile != 0;
}

// A tile in column tile blockIdx.x. Avoids the divisions of tile_at.
__device__ __forceinline__ Tile full_tile(const Layout& layout, uint32_t row_tile) {
  Tile tile = {};
  tile.row_tile = static_cast<int32_t>(row_tile);
  tile.col_tile = static_cast<int32_t>(blockIdx.x);
  tile.row = static_cast<int64_t>(row_tile) * kTile;
  tile.col = static_cast<int64_t>(blockIdx.x) * kTile;
  tile.rows = tile.cols = kTile;
  if (layout.grouped()) {
    const RowTile of_table = layout.row_tile_table[row_tile];
    tile.group = of_table.group;
    tile.tail = of_table.group == layout.groups;
    tile.row = of_table.row;
    tile.rows = of_table.rows;
    tile.used_row_tiles = of_table.used_row_tiles;
  }
  return tile;
}

// Copies a warp's rows to shared memory by cp.async, 16 bytes per lane.
template <typename T>
__device__ __forceinline__ void load_rows_async(const NvArgs& args, uint32_t row0, uint32_t col0,
                                                uint32_t warp, uint32_t lane, NvFullTileShared<T>& shared) {
  constexpr uint32_t kLanes = kTile * sizeof(T) / 16,
                     kStep = kWarpSize / kLanes;  // lanes per row; rows at once
  const uint64_t cols = static_cast<uint64_t>(args.layout.cols);
  const uint32_t row = warp * kNvBlock + lane / kLanes, col = lane % kLanes * (16 / sizeof(T));
  const char* source = static_cast<const char*>(args.input) + ((row0 + row) * cols + col0 + col) * sizeof(T);
  const uint32_t target = shared_address(&shared.rows[row][col]);
#pragma unroll
  for (uint32_t i = 0; i < kNvBlock / kStep; ++i, source += cols * kStep * sizeof(T)) {
    ptx::cp_async(target + i * kStep * NvFullTileShared<T>::kPitch * static_cast<uint32_t>(sizeof(T)),
                  source);
  }
}

__device__ __forceinline__ void wait_for_rows() {
  ptx::cp_async_wait_all();
  __syncwarp();
}

// Computes what all threads need: a thread for each direction computes the global scales, a thread of another
// warp the Philox round keys.
template <NvEncoding encoding, typename T>
__device__ __forceinline__ void find_common(const NvArgs& args, const Tile& tile,
                                            NvFullTileShared<T>& shared) {
  if (threadIdx.x < 2) {
    const float* amax = threadIdx.x == 0 ? (args.rowwise ? args.amax : nullptr) : args.amax_t;
    if (amax) shared.globals[threadIdx.x] = nv_global(amax[tile.group], args.method);
  }
  if (encoding == NvEncoding::kStochastic && threadIdx.x == kWarpSize) {
    shared.keys = PhiloxKeys(static_cast<uint64_t>(*args.seed));
  }
}

// The blocks of rows that a lane encodes: one in every fourth row of its warp.
template <NvEncoding encoding, typename T>
struct NvFullTileRows {
  static constexpr int kBlocks = 4, kAtOnce = encoding == NvEncoding::kStochastic ? 2 : 1;
  uint32_t row, block;   // of the first block, in the tile
  uint32_t line_blocks;  // per row of the matrix
  uint64_t number;       // of the first block, in the matrix
  Philox4 random[kAtOnce] = {};

  __device__ __forceinline__ NvFullTileRows(const NvArgs& args, uint32_t row0, uint32_t col0, uint32_t warp,
                                            uint32_t lane)
      : row(warp * kNvBlock + lane / 4 % 2 + lane / 16 * 2),
        block(block_of_lane(static_cast<int>(lane))),
        line_blocks(static_cast<uint32_t>(args.layout.cols) / kNvBlock),
        number(static_cast<uint64_t>(row0 + row) * line_blocks + (col0 / kNvBlock + block)) {}

  // Random bits of all four blocks, of which registers hold only two; the others go to `later`.
  __device__ __forceinline__ void find_random(const PhiloxKeys& keys, uint4 (&later)[2][kThreads]) {
    const uint32_t first = static_cast<uint32_t>(number), step = 4 * line_blocks;
    philox_small<2>(keys, {first + 2 * step, first + 3 * step}, 0, random);
#pragma unroll
    for (int i = 0; i < 2; ++i) memcpy(&later[i][threadIdx.x], &random[i], sizeof(uint4));
    philox_small<2>(keys, {first, first + step}, 0, random);
  }

  __device__ __forceinline__ void encode(const NvArgs& args, const uint4 (*later)[kThreads],
                                         NvFullTileShared<T>& shared) {
    constexpr uint32_t kRowStep = 4, kBytes = sizeof(shared.rows[0]);
    const NvGlobal global = shared.globals[0];
    uint2* data = reinterpret_cast<uint2*>(args.data) + number;
    uint32_t source = row * kBytes + block * sizeof(NvPairs<T>), scale = row * kNvBlocksPerRow + block;
    keep_in_register(source);
    keep_in_register(scale);
#pragma unroll 1
    for (int i = 0; i < kBlocks; i += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        NvPairs<T> pairs;
        memcpy(pairs, __builtin_assume_aligned(reinterpret_cast<const char*>(shared.rows) + source, 16),
               sizeof(pairs));
        NvBlockValues values;
        const float check = unpack<T>(pairs, values);
        const NvBlock result = encode_block<encoding>(args.method, values, check, check, global, random[j]);
        *data = result.data;
        shared.scales[0][scale] = result.scale;
        data += kRowStep * static_cast<uint64_t>(line_blocks);
        source += kRowStep * kBytes;
        scale += kRowStep * kNvBlocksPerRow;
      }
      if constexpr (encoding == NvEncoding::kStochastic) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) memcpy(&random[j], &later[j][threadIdx.x], sizeof(uint4));
      }
    }
  }
};

// Signs of 8 rows of two neighbouring columns, in the form of NvBlockValues.
__device__ __forceinline__ void signs_of_two(const uint32_t* rows, uint32_t& left, uint32_t& right) {
  const uint32_t even0 = __byte_perm(rows[0], rows[2], 0x7351), even1 = __byte_perm(rows[4], rows[6], 0x7351);
  const uint32_t odd0 = __byte_perm(rows[1], rows[3], 0x7351), odd1 = __byte_perm(rows[5], rows[7], 0x7351);
  left = place_signs(__byte_perm(even0, even1, 0x5410), __byte_perm(odd0, odd1, 0x5410));
  right = place_signs(__byte_perm(even0, even1, 0x7632), __byte_perm(odd0, odd1, 0x7632));
}

// Sixteen rows of two neighbouring columns.
template <bool hadamard, typename T>
struct NvTwoColumns {
  Packed2<T> rows[kNvBlock];
  float check[2];
  uint2 signs[2];

  __device__ __forceinline__ explicit NvTwoColumns(const T* source) {
#pragma unroll
    for (int r = 0; r < kNvBlock; ++r) {
      memcpy(&rows[r], source + r * NvFullTileShared<T>::kPitch, sizeof(rows[r]));
    }
    if constexpr (!hadamard) {
      Packed2<T> largest = zeros<T>();
#pragma unroll
      for (int r = 0; r < kNvBlock; ++r) largest = max_abs_nan(largest, rows[r]);
      const float2 two = to_floats(largest);
      check[0] = fabsf(two.x);
      check[1] = fabsf(two.y);
      uint32_t words[kNvBlock];
      memcpy(words, rows, sizeof(words));
      signs_of_two(words, signs[0].x, signs[1].x);
      signs_of_two(words + 8, signs[0].y, signs[1].y);
    }
  }
  // One of the columns, after the transform if `hadamard`. Returns the maximum of its magnitudes, NaN if one
  // is.
  __device__ __forceinline__ float take(uint32_t i, NvBlockValues& column) const {
#pragma unroll
    for (int r = 0; r < kNvBlock; ++r) {
      const float2 two = to_floats(rows[r]);
      column.at[r] = i == 0 ? two.x : two.y;
    }
    if constexpr (hadamard) {
      NvPairs<T> pairs;
      transform<T>(column.at, pairs);
      return unpack<T>(pairs, column);
    } else {
      column.signs = signs[i];
      return check[i];
    }
  }
};

// Encodes a warp's 16 rows of 4 columns per lane, two columns at a time, to shared memory.
template <NvEncoding encoding, bool hadamard, typename T>
__device__ __forceinline__ void encode_full_tile_columns(const NvArgs& args, uint32_t row0, uint32_t col0,
                                                         uint32_t warp, uint32_t lane,
                                                         NvFullTileShared<T>& shared) {
  const NvGlobal global = shared.globals[1];
  const uint32_t line_blocks = static_cast<uint32_t>(args.layout.rows) / kNvBlock;
#pragma unroll 1
  for (uint32_t c = 0; c < kColsPerThread; c += 2) {
    const uint32_t column = lane * kColsPerThread + c;
    const NvTwoColumns<hadamard, T> two(&shared.rows[warp * kNvBlock][column]);
    Philox4 random[2] = {};
    if constexpr (encoding == NvEncoding::kStochastic) {
      const uint32_t first = (col0 + column) * line_blocks + row0 / kNvBlock + warp;
      philox_small<2>(shared.keys, {first, first + line_blocks}, 1, random);
    }
    uint32_t scales = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      NvBlockValues values;
      const float check = two.take(i, values);
      const NvBlock result = encode_block<encoding>(args.method, values, check, check, global, random[i]);
      shared.transposed_tile.words[NvTransposedTile::place(column + i, warp)] = result.data;
      scales |= static_cast<uint32_t>(result.scale) << (8 * i);
    }
    *reinterpret_cast<uint16_t*>(&shared.scales_t[warp][column]) = static_cast<uint16_t>(scales);
  }
}

// A thread stores one word of a row's scales and one of a column's.
template <typename T>
__device__ __forceinline__ void store_full_tile_scales(const NvArgs& args, const Tile& tile,
                                                       const NvFullTileShared<T>& shared) {
  Layout layout = args.layout;
  layout.granularity = ScaleGranularity::k1x16;  // a constant for the compiler
  const int scale_row = threadIdx.x / 2, word = threadIdx.x % 2;
  if (args.rowwise) {
    const ScaleWords scale_words(layout, tile, false);
    store_evict_last(args.scale + scale_words.at(scale_row, word),
                     *reinterpret_cast<const uint32_t*>(&shared.scales[scale_row][4 * word]));
  }
  const ScaleWords scale_words(layout, tile, true);
  store_evict_last(args.scale_t + scale_words.at(scale_row, word),
                   column_scales(shared.scales_t, scale_row, word));
}

// Stores transposed data: 8 lanes store 64 bytes of a row of it.
template <typename T>
__device__ __forceinline__ void store_full_tile_columns(const NvArgs& args, uint32_t row0, uint32_t col0,
                                                        const NvFullTileShared<T>& shared) {
  const uint32_t line_blocks = static_cast<uint32_t>(args.layout.rows) / kNvBlock;
  const uint32_t block = threadIdx.x % kNvBlocksPerRow, column = threadIdx.x / kNvBlocksPerRow;
  const uint32_t place = NvTransposedTile::place(column, block);
  uint2* target = reinterpret_cast<uint2*>(args.data_t) +
                  (static_cast<uint64_t>(col0 + column) * line_blocks + (row0 / kNvBlock + block));
#pragma unroll
  for (uint32_t i = 0; i < kTile / NvTransposedTile::kPeriod; ++i) {
    *target = shared.transposed_tile.words[NvTransposedTile::periods_on(place, i)];
    target += static_cast<uint64_t>(NvTransposedTile::kPeriod) * line_blocks;
  }
}

template <typename T, NvEncoding encoding>
struct NvFullTileBlock {
  NvFullTileShared<T> shared;
  uint4 later[2][encoding == NvEncoding::kStochastic ? kThreads : 1];
};

template <typename T, NvEncoding encoding, bool hadamard>
__device__ __forceinline__ void quantize_full_tile(const NvArgs& args, const Tile& tile,
                                                   NvFullTileBlock<T, encoding>& block) {
  constexpr bool kRandom = encoding == NvEncoding::kStochastic;
  NvFullTileShared<T>& shared = block.shared;
  const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t row0 = static_cast<uint32_t>(tile.row), col0 = static_cast<uint32_t>(tile.col);
  load_rows_async(args, row0, col0, warp, lane, shared);
  find_common<encoding>(args, tile, shared);
  if (tile.col_tile == 0 || tile.row_tile == 0) zero_nv_padding(args, tile);
  __syncthreads();
  NvFullTileRows<encoding, T> rows(args, row0, col0, warp, lane);
  const uint4(*later_random)[kThreads] = nullptr;
  if constexpr (kRandom) {
    rows.find_random(shared.keys, block.later);
    later_random = block.later;
  }
  wait_for_rows();
  if (args.rowwise) rows.encode(args, later_random, shared);
  encode_full_tile_columns<encoding, hadamard>(args, row0, col0, warp, lane, shared);
  __syncthreads();
  store_full_tile_scales(args, tile, shared);
  store_full_tile_columns(args, row0, col0, shared);
}

// A block processes one row tile, and of a ragged matrix up to two.
template <typename T, NvEncoding encoding, bool hadamard>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_nv_full_tiles_kernel(const __grid_constant__ NvArgs args) {
  __shared__ NvFullTileBlock<T, encoding> block;
  pdl_wait();
  pdl_launch_dependents();
  if (args.is_noop()) return;
#pragma unroll 1
  for (uint32_t row_tile = blockIdx.y;;) {
    const Tile tile = full_tile(args.layout, row_tile);
    if (is_full_tile(tile)) quantize_full_tile<T, encoding, hadamard>(args, tile, block);
    row_tile += gridDim.y;
    if (!args.layout.grouped() || static_cast<int>(row_tile) >= tile.used_row_tiles) return;
    __syncthreads();  // the tile's shared memory may be overwritten
  }
}

inline dim3 full_tile_grid(const Layout& layout) {
  const unsigned row_tiles =
      layout.grouped() ? block_rows(layout) : static_cast<unsigned>(layout.rows / kTile);
  return dim3(static_cast<unsigned>(layout.cols / kTile), row_tiles);
}

}  // namespace transformer_plugin::quantize
