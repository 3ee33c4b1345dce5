// Whole tiles of 16-bit values in NVFP4: the case that has to be fast. Tiles that are not whole, square blocks, and scales of
// whole rows are left to nv_tile.cuh, which gives the same bytes.
//
// Rows go to shared memory without passing through registers, while scales of the matrix and random bits are found. A warp
// has 16 rows: first it codes blocks of them, one to a lane, then blocks down their columns. What a thread does is counted in
// instructions here, not in bytes: 25 for an element that is coded in both directions.
#pragma once

#include "common/philox.cuh"
#include "quantize/cuda/nvfp4/encode.cuh"

namespace transformer_plugin::quantize {

template <typename T>
struct NvWholeShared {
  static constexpr int kPitch = kTile + 16 / sizeof(T);  // so that two rows lie in different banks
  alignas(16) T rows[kTile][kPitch];
  NvTurned turned;
  alignas(4) uint8_t scales[kTile][kNvBlocks];
  alignas(4) uint8_t scales_t[kNvBlocks][kTile];
  NvGlobal globals[2];  // of the rows, and of the columns
  PhiloxKeys keys;
};

// Whether nv_whole_kernel writes a tile, of those matrices that takes_whole_tiles holds for.
__device__ __forceinline__ bool is_whole(const Tile& tile) {
  return tile.rows == kTile && tile.cols == kTile && !tile.tail && tile.row % kNvBlock == 0;
}

inline bool takes_whole_tiles(const NvArgs& args) {
  const Layout& layout = args.layout;
  constexpr int64_t kMostGridRows = 65535, kMostBlocks = int64_t{1} << 32;  // counted in 32 bits
  return args.transposed && !layout.square && !args.row_scaled && layout.members == 1 &&
         layout.rows >= kTile && layout.cols >= kTile && layout.cols % (16 / sizeof(uint16_t)) == 0 &&
         layout.row_tiles() <= kMostGridRows && layout.rows * layout.cols / kNvBlock < kMostBlocks &&
         reinterpret_cast<uintptr_t>(args.input) % 16 == 0;
}

// Whether there are tiles that are not whole, as far as a host can know.
inline bool may_have_other_tiles(const Layout& layout) {
  return layout.grouped() || layout.rows % kTile != 0 || layout.cols % kTile != 0;
}

// A tile of this block's column, in a grid of whole columns of tiles. Without the divisions of tile_at.
__device__ __forceinline__ Tile whole_tile(const Layout& layout, uint32_t row_tile) {
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
    tile.used = of_table.used;
  }
  return tile;
}

// A warp's rows, 16 bytes a lane, are sent for; they are there after cp.async.wait_all.
template <typename T>
__device__ __forceinline__ void send_for_rows(const NvArgs& args, uint32_t row0, uint32_t col0, uint32_t warp,
                                              uint32_t lane, NvWholeShared<T>& shared) {
  constexpr uint32_t kLanes = kTile * sizeof(T) / 16, kStep = kWarpSize / kLanes;  // of a row; rows at once
  const uint64_t cols = static_cast<uint64_t>(args.layout.cols);
  const uint32_t row = warp * kNvBlock + lane / kLanes, col = lane % kLanes * (16 / sizeof(T));
  const char* source = static_cast<const char*>(args.input) + ((row0 + row) * cols + col0 + col) * sizeof(T);
  const uint32_t target = shared_address(&shared.rows[row][col]);
#pragma unroll
  for (uint32_t i = 0; i < kNvBlock / kStep; ++i, source += cols * kStep * sizeof(T)) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     target + i * kStep * NvWholeShared<T>::kPitch * static_cast<uint32_t>(sizeof(T))),
                 "l"(source)
                 : "memory");
  }
}

__device__ __forceinline__ void wait_for_rows() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// What all threads need: scales of the matrix, by a thread for each direction, and round keys, by a thread of another warp.
template <NvCoding coding, typename T>
__device__ __forceinline__ void find_common(const NvArgs& args, const Tile& tile, NvWholeShared<T>& shared) {
  if (threadIdx.x < 2) {
    const float* amax = threadIdx.x == 0 ? (args.rowwise ? args.amax : nullptr) : args.amax_t;
    if (amax) shared.globals[threadIdx.x] = nv_global(amax[tile.group], nv_bound(args.method));
  }
  if (coding == NvCoding::kStochastic && threadIdx.x == kWarpSize) {
    shared.keys = PhiloxKeys(static_cast<uint64_t>(*args.seed));
  }
}

// The blocks of a lane, in every fourth row of its warp.
template <NvCoding coding, typename T>
struct NvWholeRows {
  static constexpr int kBlocks = 4, kAtOnce = coding == NvCoding::kStochastic ? 2 : 1;
  uint32_t row, block;   // the first's, in the tile
  uint32_t line_blocks;  // of a row of the matrix
  uint64_t number;       // the first's, of the matrix
  Philox4 random[kAtOnce] = {};

  __device__ __forceinline__ NvWholeRows(const NvArgs& args, uint32_t row0, uint32_t col0, uint32_t warp,
                                         uint32_t lane)
      : row(warp * kNvBlock + lane / 4 % 2 + lane / 16 * 2),
        block(block_of_lane(static_cast<int>(lane))),
        line_blocks(static_cast<uint32_t>(args.layout.cols) / kNvBlock),
        number(static_cast<uint64_t>(row0 + row) * line_blocks + (col0 / kNvBlock + block)) {}

  // Of all blocks, of which only two fit the registers.
  __device__ __forceinline__ void find_random(const PhiloxKeys& keys, uint4 (&later)[2][kThreads]) {
    const uint32_t first = static_cast<uint32_t>(number), step = 4 * line_blocks;
    philox_small<2>(keys, {first + 2 * step, first + 3 * step}, 0, random);
#pragma unroll
    for (int i = 0; i < 2; ++i) memcpy(&later[i][threadIdx.x], &random[i], sizeof(uint4));
    philox_small<2>(keys, {first, first + step}, 0, random);
  }

  __device__ __forceinline__ void encode(const NvArgs& args, const uint4 (*later)[kThreads],
                                         NvWholeShared<T>& shared) {
    constexpr uint32_t kRowStep = 4, kBytes = sizeof(shared.rows[0]);
    const NvGlobal global = shared.globals[0];
    uint2* data = reinterpret_cast<uint2*>(args.data) + number;
    uint32_t source = row * kBytes + block * sizeof(NvPairs<T>), scale = row * kNvBlocks + block;
    keep(source);
    keep(scale);
#pragma unroll 1
    for (int i = 0; i < kBlocks; i += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        NvPairs<T> pairs;
        memcpy(pairs, __builtin_assume_aligned(reinterpret_cast<const char*>(shared.rows) + source, 16),
               sizeof(pairs));
        NvValues values;
        const float check = unpack<T>(pairs, values);
        const NvBlock coded = encode_block<coding>(args.method, values, check, check, global, random[j]);
        *data = coded.codes;
        shared.scales[0][scale] = coded.scale;
        data += kRowStep * static_cast<uint64_t>(line_blocks);
        source += kRowStep * kBytes;
        scale += kRowStep * kNvBlocks;
      }
      if constexpr (coding == NvCoding::kStochastic) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) memcpy(&random[j], &later[j][threadIdx.x], sizeof(uint4));
      }
    }
  }
};

// Signs of 8 rows of two neighbouring columns, as NvValues has them.
__device__ __forceinline__ void signs_of_two(const uint32_t* rows, uint32_t& left, uint32_t& right) {
  const uint32_t even0 = __byte_perm(rows[0], rows[2], 0x7351), even1 = __byte_perm(rows[4], rows[6], 0x7351);
  const uint32_t odd0 = __byte_perm(rows[1], rows[3], 0x7351), odd1 = __byte_perm(rows[5], rows[7], 0x7351);
  left = place_signs(__byte_perm(even0, even1, 0x5410), __byte_perm(odd0, odd1, 0x5410));
  right = place_signs(__byte_perm(even0, even1, 0x7632), __byte_perm(odd0, odd1, 0x7632));
}

// 16 rows of two neighbouring columns, and what both have in common.
template <bool hadamard, typename T>
struct NvTwoColumns {
  Two<T> rows[kNvBlock];
  float check[2];
  uint2 signs[2];

  __device__ __forceinline__ explicit NvTwoColumns(const T* source) {
#pragma unroll
    for (int r = 0; r < kNvBlock; ++r) {
      memcpy(&rows[r], source + r * NvWholeShared<T>::kPitch, sizeof(rows[r]));
    }
    if constexpr (!hadamard) {
      Two<T> largest = zeros<T>();
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
  // One of them, transformed if that is asked for. Returns its largest magnitude, NaN if one is.
  __device__ __forceinline__ float take(uint32_t i, NvValues& column) const {
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

// A warp's 16 rows of four columns a lane, two at a time: their codes, turned, and scales to shared memory.
template <NvCoding coding, bool hadamard, typename T>
__device__ __forceinline__ void encode_whole_columns(const NvArgs& args, uint32_t row0, uint32_t col0,
                                                     uint32_t warp, uint32_t lane, NvWholeShared<T>& shared) {
  const NvGlobal global = shared.globals[1];
  const uint32_t line_blocks = static_cast<uint32_t>(args.layout.rows) / kNvBlock;
#pragma unroll 1
  for (uint32_t c = 0; c < kColsPerThread; c += 2) {
    const uint32_t column = lane * kColsPerThread + c;
    const NvTwoColumns<hadamard, T> two(&shared.rows[warp * kNvBlock][column]);
    Philox4 random[2] = {};
    if constexpr (coding == NvCoding::kStochastic) {
      const uint32_t first = (col0 + column) * line_blocks + row0 / kNvBlock + warp;
      philox_small<2>(shared.keys, {first, first + line_blocks}, 1, random);
    }
    uint32_t scales = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      NvValues values;
      const float check = two.take(i, values);
      const NvBlock coded = encode_block<coding>(args.method, values, check, check, global, random[i]);
      shared.turned.words[NvTurned::place(column + i, warp)] = coded.codes;
      scales |= static_cast<uint32_t>(coded.scale) << (8 * i);
    }
    *reinterpret_cast<uint16_t*>(&shared.scales_t[warp][column]) = static_cast<uint16_t>(scales);
  }
}

// A thread has a word of a row's scales and one of a column's.
template <typename T>
__device__ __forceinline__ void store_whole_scales(const NvArgs& args, const Tile& tile,
                                                   const NvWholeShared<T>& shared) {
  Layout layout = args.layout;
  layout.mode = ScaleMode::kNv;  // as it is: what the compiler knows it need not compute
  const int line = threadIdx.x / 2, word = threadIdx.x % 2;
  if (args.rowwise) {
    const WordLines lines(layout, tile, false);
    store_kept(args.scale + lines.at(line, word),
               *reinterpret_cast<const uint32_t*>(&shared.scales[line][4 * word]));
  }
  const WordLines lines(layout, tile, true);
  store_kept(args.scale_t + lines.at(line, word), column_scales(shared.scales_t, line, word));
}

// Turned codes, 64 bytes of a line by 8 lanes.
template <typename T>
__device__ __forceinline__ void store_whole_columns(const NvArgs& args, uint32_t row0, uint32_t col0,
                                                    const NvWholeShared<T>& shared) {
  const uint32_t line_blocks = static_cast<uint32_t>(args.layout.rows) / kNvBlock;
  const uint32_t block = threadIdx.x % kNvBlocks, column = threadIdx.x / kNvBlocks;
  const uint32_t place = NvTurned::place(column, block);
  uint2* target = reinterpret_cast<uint2*>(args.data_t) +
                  (static_cast<uint64_t>(col0 + column) * line_blocks + (row0 / kNvBlock + block));
#pragma unroll
  for (uint32_t i = 0; i < kTile / NvTurned::kPeriod; ++i) {
    *target = shared.turned.words[NvTurned::periods_on(place, i)];
    target += static_cast<uint64_t>(NvTurned::kPeriod) * line_blocks;
  }
}

template <typename T, NvCoding coding>
struct NvWholeBlock {
  NvWholeShared<T> shared;
  uint4 later[2][coding == NvCoding::kStochastic ? kThreads : 1];
};

template <typename T, NvCoding coding, bool hadamard>
__device__ __forceinline__ void quantize_whole_tile(const NvArgs& args, const Tile& tile,
                                                    NvWholeBlock<T, coding>& block) {
  constexpr bool kRandom = coding == NvCoding::kStochastic;
  NvWholeShared<T>& shared = block.shared;
  const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t row0 = static_cast<uint32_t>(tile.row), col0 = static_cast<uint32_t>(tile.col);
  send_for_rows(args, row0, col0, warp, lane, shared);
  find_common<coding>(args, tile, shared);
  if (tile.col_tile == 0 || tile.row_tile == 0) zero_nv_padding(args, tile);
  __syncthreads();
  NvWholeRows<coding, T> rows(args, row0, col0, warp, lane);
  const uint4(*found)[kThreads] = nullptr;
  if constexpr (kRandom) {
    rows.find_random(shared.keys, block.later);
    found = block.later;
  }
  wait_for_rows();
  if (args.rowwise) rows.encode(args, found, shared);
  encode_whole_columns<coding, hadamard>(args, row0, col0, warp, lane, shared);
  __syncthreads();
  store_whole_scales(args, tile, shared);
  store_whole_columns(args, row0, col0, shared);
}

// Row tiles of a ragged matrix are up to two for each of this grid's.
template <typename T, NvCoding coding, bool hadamard>
__global__ void __launch_bounds__(kThreads, 4) nv_whole_kernel(const __grid_constant__ NvArgs args) {
  __shared__ NvWholeBlock<T, coding> block;
  pdl_wait();
  pdl_launch_dependents();
  if (args.is_noop()) return;
#pragma unroll 1
  for (uint32_t row_tile = blockIdx.y;;) {
    const Tile tile = whole_tile(args.layout, row_tile);
    if (is_whole(tile)) quantize_whole_tile<T, coding, hadamard>(args, tile, block);
    row_tile += gridDim.y;
    if (!args.layout.grouped() || static_cast<int>(row_tile) >= tile.used) return;
    __syncthreads();  // the tile has left shared memory
  }
}

template <typename T, NvCoding coding, bool hadamard>
void launch_nv_whole(const NvArgs& args, cudaStream_t stream) {
  const Layout& layout = args.layout;
  const unsigned row_tiles =
      layout.grouped() ? block_rows(layout) : static_cast<unsigned>(layout.rows / kTile);
  const dim3 grid(static_cast<unsigned>(layout.cols / kTile), row_tiles);
  launch_pdl(nv_whole_kernel<T, coding, hadamard>, grid, kThreads, 0, stream, args);
  check_launch("nv_whole_kernel");
}

}  // namespace transformer_plugin::quantize
