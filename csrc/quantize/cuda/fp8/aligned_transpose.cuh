// Quantizes ragged groups to FP8 in both directions, or only to transposed data, in the `aligned` layout of
// transposed data (quantize/args/layout.h). Formulas, shapes and dtypes are those of ragged_transpose.cuh.
//
// In this layout a tile begins at a multiple of 32 bytes in each row of transposed data, so every tile stores
// whole sectors and parts may end anywhere. A tile also stores the zeros up to the next tile; the first tile
// stores those from element 0, the last those up to the end of the row, or of its sector if the tail is left out.
//
// Without a row index the kernel is for short groups: the rows of the next tiles are loaded into the ring
// while the current tile is encoded, and the time of a tile depends on its number of rows. Grid: column tiles
// (128 columns) times parts of up to 4 row tiles. Block: 256 threads, 8 warps. Warp w holds rows 16w to
// 16w + 15 of the tile; a warp without rows only waits at barriers.
//
// With a row index (AlignedGatherShared) row i of the matrix is row index[i] of the input, and groups may have
// any length (select_launcher.h). A block reads the entries of its part once, before its first rows. The blocks
// of a column tile follow each other.
//
// Dynamic shared memory (AlignedTransposeShared): the ring of 128 input rows, a transposed tile, maxima and
// scales of columns, the list of the part's row tiles, and the index entries of the part.
#pragma once

#include <algorithm>

#include "common/ptx/cp_async.cuh"
#include "common/row_index.cuh"
#include "common/shared_memory.cuh"
#include "quantize/cuda/fp8/segment.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kAlignedBlocksPerSm = 3;  // four would leave too few registers
inline constexpr int kAlignedTiles = 4;        // row tiles of a part, at most
inline constexpr int kPartRows = kAlignedTiles * kTile;
static_assert(kPartRows % kThreads == 0, "threads read equally many index entries");

// A row tile of a part. The list ends with one more entry, of which only `begin` is valid: the end of the
// part.
struct alignas(16) PartTile {
  int begin;  // element of each row of transposed data at which the tile begins
  int row;
  int rows;
  int group;
};

struct AlignedTransposeShared {
  static constexpr bool kIndexed = false;
  alignas(16) uint16_t ring[kRing][kTile];
  TransposedTile transposed_tile;
  alignas(16) float partial[kWarps][kTile];  // amax of each column over the rows of a warp
  alignas(16) float scales[kTile];           // of the columns
  PartTile tiles[kAlignedTiles + 1];
};

// Of rows that are read by an index.
struct AlignedGatherShared : AlignedTransposeShared {
  static constexpr bool kIndexed = true;
  int32_t input_rows[kPartRows];  // of each row of the part, or kRowOfZeros; row r is at r % kPartRows
};

// Hides a value from the optimizer, so that what depends on it is computed again in each iteration of a loop:
// the registers that would keep those results are needed for the tile's values.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Reads the index entries of rows `begin` to `end`. Rows after the groups, and entries that are not rows of
// the input, are rows of zeros; the latter are reported unless they are kRowOfZeros.
__device__ __forceinline__ void read_row_index(const QuantizeArgs& args, int begin, int end,
                                               AlignedGatherShared& shared) {
  constexpr int kEntries = kPartRows / kThreads;
  const int used = min(end, *args.row_index.end);
  int64_t entries[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int row = begin + static_cast<int>(threadIdx.x) + i * kThreads;
    entries[i] = row < used ? entry(args.row_index, row) : kRowOfZeros;
  }
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int row = begin + static_cast<int>(threadIdx.x) + i * kThreads;
    const bool inside = is_inside(args.row_index, entries[i]);
    if (!inside && entries[i] != kRowOfZeros) report_wrong_row(args.wrong_row, args.row_index, row);
    if (row < end) {
      shared.input_rows[static_cast<uint32_t>(row) % kPartRows] =
          inside ? static_cast<int32_t>(entries[i]) : kRowOfZeros;
    }
  }
}

// Copies rows `begin` to `end` into the ring by cp.async; the row of the buffer determines its place.
// Addresses are computed anew in each call to save registers.
template <typename T, typename Shared>
__device__ __forceinline__ void load_rows_async(const QuantizeArgs& args, int col, int cols, int begin,
                                                int end, Shared& shared) {
  constexpr int kPieces = kTile * sizeof(T) / 16, kRowsAtOnce = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
  if (piece * (16 / static_cast<int>(sizeof(T))) >= cols) return;
  const uint32_t pitch = static_cast<uint32_t>(args.layout.cols * sizeof(T));
  int row = begin + static_cast<int>(threadIdx.x / kPieces);
  const char* from = static_cast<const char*>(args.input) + static_cast<int64_t>(col) * sizeof(T) +
                     static_cast<int64_t>(Shared::kIndexed ? 0 : row) * pitch + piece * 16;
  const uint32_t to = shared_address(shared.ring) + piece * 16;
#pragma unroll
  for (int i = 0; i < kRing / kRowsAtOnce; ++i) {
    if (row < end) {
      const uint32_t place =
          to + static_cast<uint32_t>(row) % kRing * static_cast<uint32_t>(sizeof(shared.ring[0]));
      if constexpr (Shared::kIndexed) {
        const int input_row = shared.input_rows[static_cast<uint32_t>(row) % kPartRows];
        ptx::cp_async_zfill(place, from + static_cast<uint64_t>(max(input_row, 0)) * pitch, input_row >= 0);
      } else {
        ptx::cp_async(place, from);
      }
    }
    row += kRowsAtOnce;
    if constexpr (!Shared::kIndexed) from += pitch * static_cast<uint32_t>(kRowsAtOnce);
  }
}

// A warp's segment from the ring to registers. It may wrap around the end of the ring. Rows after the first
// `valid` ones are zero; their data may not have arrived.
template <typename T>
__device__ __forceinline__ void load_aligned_segment(const uint16_t (&ring)[kRing][kTile], int first_row,
                                                     int valid, int lane, TileFragment<T>& values) {
  const uint32_t first = static_cast<uint32_t>(first_row) % kRing;
  const auto load = [&](int r, uint32_t row) {
    const auto vector = reinterpret_cast<const Vector4<T>*>(ring[row])[lane];
    memcpy(values.at[r], &vector, sizeof(vector));
  };
  if (valid == kRowsPerThread && first <= kRing - kRowsPerThread) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) load(r, first + r);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    values.at[r][0] = values.at[r][1] = zeros<T>();
    if (r < valid) load(r, (first + r) % kRing);
  }
}

// Stores elements `begin` to `end` of each row of transposed data of this column tile: the `count` chunks
// from element `first` on come from the tile, all others are zero. All positions are multiples of 16. As many
// lanes store one row as it has chunks.
__device__ __forceinline__ void store_row_segments(const Layout& layout, uint8_t* data_t, int col, int begin,
                                                   int end, int first, int count,
                                                   TransposedTile& transposed_tile) {
  const int64_t stride = layout.transposed_row_length();
  uint8_t* rows = data_t + col * stride;
  const int cols = min(kTile, static_cast<int>(layout.cols) - col);
  const int chunks = (end - begin) / kChunk;
  const int shift = chunks <= 4 ? 2 : (chunks <= 8 ? 3 : 4);
  const int lanes = 1 << shift, step = kThreads >> shift;
  const int first_column = static_cast<int>(threadIdx.x) >> shift;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % lanes; i < chunks; i += lanes) {
    const int chunk = i - (first - begin) / kChunk;
    const bool in_tile = chunk >= 0 && chunk < count;
    uint8_t* target = rows + first_column * stride + begin + i * kChunk;
#pragma unroll 2
    for (int column = first_column; column < cols; column += step, target += step * stride) {
      uint4 bytes = {};
      if (in_tile) bytes = transposed_tile.chunk(column, chunk);
      *reinterpret_cast<uint4*>(target) = bytes;
    }
  }
}

// The share of one block: `count` row tiles from `first` on, for column tile `strip`.
struct AlignedBlock {
  int strip;
  int first, count;
  int end_row;                                    // the buffer's row after the part
  int64_t row_scales_width, column_scales_width;  // row lengths of the two scale matrices
};

// Zeroes the column scales of row tiles that hold no rows, lists the part's tiles in shared memory and starts
// to load their rows. A block without a part has `count` 0.
template <bool blocks, typename T, typename Shared>
__device__ __forceinline__ AlignedBlock begin_aligned_block(const QuantizeArgs& args, Shared& shared) {
  const Layout& layout = args.layout;
  AlignedBlock block = {};
  block.row_scales_width = round_up_4(layout.rows);
  block.column_scales_width = round_up_4(layout.cols);
  const int col_tiles = static_cast<int>(layout.col_tiles());
  const int parts = static_cast<int>(gridDim.x) / col_tiles;
  // Rows that are read by an index are read again for other groups. One column tile after the other, the L2
  // cache holds what is read again; all columns of the input it would not.
  block.strip = static_cast<int>(blockIdx.x) / (Shared::kIndexed ? parts : 1) % col_tiles;
  const int part = static_cast<int>(blockIdx.x) / (Shared::kIndexed ? 1 : col_tiles) % parts;
  const int col = block.strip * kTile, cols = min(kTile, static_cast<int>(layout.cols) - col);
  const RowTile* table = layout.row_tile_table;
  const int used = warp_uniform(table[0].used_row_tiles);
  if (blocks && layout.zero_tail) {
    for (int index = used + part; index < static_cast<int>(layout.row_tiles()); index += parts) {
      if (threadIdx.x < cols) args.scale_t[index * block.column_scales_width + col + threadIdx.x] = 0.0f;
    }
  }
  block.first = first_of_part(part, parts, used);
  block.count = first_of_part(part + 1, parts, used) - block.first;
  if (block.count == 0) return block;
  if (threadIdx.x <= block.count) {
    const int index = block.first + static_cast<int>(threadIdx.x);
    PartTile tile = {static_cast<int>(layout.transposed_row_length()), 0, 0, 0};
    if (index < used) {
      const RowTile& listed = table[index];
      tile = {static_cast<int>(aligned_begin(listed.row, listed.group)), listed.row, listed.rows,
              listed.group};
    } else if (!layout.zero_tail) {
      const RowTile& last = table[used - 1];
      tile.begin = static_cast<int>(aligned_begin(aligned_begin(last.row, last.group) + last.rows, 0));
    }
    shared.tiles[threadIdx.x] = tile;
  }
  if constexpr (Shared::kIndexed) {
    const RowTile &first = table[block.first], &last = table[block.first + block.count - 1];
    read_row_index(args, first.row, last.row + last.rows, shared);
  }
  __syncthreads();  // tiles are listed, index entries are read
  block.end_row = shared.tiles[block.count - 1].row + shared.tiles[block.count - 1].rows;
  if (shared.tiles[0].group != layout.groups) {
    const int row = shared.tiles[0].row;
    load_rows_async<T>(args, col, cols, row, min(row + kRing, block.end_row), shared);
  }
  return block;
}

// Finds and stores the scales of the columns, then those of the warp's `valid` rows. Returns the scale of the
// row that the lane holds. The column scales are in shared memory after the next barrier. The last 4 warps
// find them, because fewest tiles have rows for those.
template <typename T>
__device__ __forceinline__ float find_aligned_scales(const QuantizeArgs& args, const AlignedBlock& block,
                                                     const PartTile& at, int tile_index, bool tail,
                                                     int segment_row, int valid, int lane,
                                                     const TileFragment<T>& values,
                                                     AlignedTransposeShared& shared) {
  const int col = opaque(block.strip) * kTile, cols = min(kTile, static_cast<int>(args.layout.cols) - col);
  const int own_column = static_cast<int>(threadIdx.x) - (kThreads - kTile);
  if (own_column >= 0) {
    float largest = shared.partial[0][own_column];
#pragma unroll
    for (int s = 1; s < kWarps; ++s) {
      if (s * kRowsPerThread < at.rows) largest = fmaxf(largest, shared.partial[s][own_column]);
    }
    const float scale = encode_scale(largest, args.rule);
    shared.scales[own_column] = scale;
    if (own_column < cols) {
      args.scale_t[tile_index * block.column_scales_width + col + own_column] = tail ? 0.0f : 1.0f / scale;
    }
  }
  float row_scale = 1.0f;
  if (args.rowwise && valid > 0) {
    row_scale = segment_row_scale(values, lane, args.rule);
    const int own = RowMaxima<kRowsPerThread, T>::first_of(lane);
    if (lane < kRowsPerThread && own < valid) {
      args.scale[opaque(block.strip) * block.row_scales_width + segment_row + own] =
          tail ? 0.0f : 1.0f / row_scale;
    }
  }
  return row_scale;
}

// Encodes the warp's rows: row-wise data to memory, transposed data to shared memory.
template <DType element, bool blocks, typename T>
__device__ __forceinline__ void write_aligned_segment(const QuantizeArgs& args, const AlignedBlock& block,
                                                      int segment_row, int valid, int warp, int lane,
                                                      const TileFragment<T>& values, float row_scale,
                                                      AlignedTransposeShared& shared) {
  const int column = opaque(block.strip) * kTile + lane * kColsPerThread;
  const uint32_t step = static_cast<uint32_t>(args.layout.cols);
  uint8_t* target = args.data + column + static_cast<int64_t>(segment_row) * step;
  float4 of_columns = make_float4(row_scale, row_scale, row_scale, row_scale);
  if (blocks) of_columns = *reinterpret_cast<const float4*>(&shared.scales[lane * kColsPerThread]);
  const float scales[kColsPerThread] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
  const uint32_t written =
      args.rowwise && column < static_cast<int>(step) ? 0xffffu >> (kRowsPerThread - valid) : 0;
  uint32_t words[kColsPerThread][kRowsPerThread / 4];
  encode_segment<element, blocks>(values, row_scale, scales, written, target, step, words);
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    shared.transposed_tile.chunk(lane * kColsPerThread + c, warp) =
        make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
  }
}

template <DType element, typename T, ScaleGranularity granularity, typename Shared>
__global__ void __launch_bounds__(kThreads, kAlignedBlocksPerSm)
    aligned_transpose_kernel(const __grid_constant__ QuantizeArgs args) {
  static_assert(sizeof(T) == 2, "the ring holds 16-bit values");
  constexpr bool kBlocks = granularity == ScaleGranularity::k1x128;
  extern __shared__ uint4 dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  pdl_wait();
  if (args.is_noop()) return;
  if (!kBlocks) store_tensor_scales(args);
  const Layout& layout = args.layout;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpSize));
  const int lane = threadIdx.x % kWarpSize;
  const AlignedBlock block = begin_aligned_block<kBlocks, T>(args, shared);
  if (block.count == 0) return;

  if (kBlocks && args.rowwise && block.first == 0 && threadIdx.x < block.row_scales_width - layout.rows) {
    args.scale[block.strip * block.row_scales_width + layout.rows + threadIdx.x] = 0.0f;
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the first rows are in the ring
  for (int i = 0; i < block.count; ++i) {
    const PartTile& at = shared.tiles[i];
    const int col = opaque(block.strip) * kTile, cols = min(kTile, static_cast<int>(layout.cols) - col);
    const bool has_columns = lane * kColsPerThread < cols;
    const bool tail = warp_uniform(at.group) == layout.groups;
    const int segment_row = at.row + warp * kRowsPerThread;  // of the buffer
    const int valid = warp_uniform(min(at.rows - warp * kRowsPerThread, kRowsPerThread));
    TileFragment<T> values;
    if (valid > 0) {
      load_aligned_segment(shared.ring, segment_row, valid, lane, values);
      if (tail || !has_columns) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) values.at[r][0] = values.at[r][1] = zeros<T>();
      }
      if (kBlocks) {
        const float2 left = values.column_max(0), right = values.column_max(1);
        *reinterpret_cast<float4*>(&shared.partial[warp][lane * kColsPerThread]) =
            make_float4(left.x, left.y, right.x, right.y);
      }
    }
    __syncthreads();  // values are in registers, maxima in shared memory; the tile may be overwritten
    if (!tail) {
      load_rows_async<T>(args, col, cols, at.row + kRing, min(at.row + at.rows + kRing, block.end_row),
                         shared);
    }
    ptx::cp_async_commit_group();

    float row_scale = 1.0f;
    if (kBlocks) {
      row_scale = find_aligned_scales(args, block, at, block.first + i, tail, segment_row, valid, lane,
                                      values, shared);
      __syncthreads();  // column scales are in shared memory
    } else if (!tail) {
      row_scale = tensor_scale(args, at.group);
    }
    if (valid > 0) {
      write_aligned_segment<element, kBlocks>(args, block, segment_row, valid, warp, lane, values, row_scale,
                                              shared);
    }

    // If the ring holds this tile and the next, the next one's rows were requested before the last group of
    // copies.
    if (at.rows + shared.tiles[i + 1].rows <= kRing) {
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();  // the transposed tile is in shared memory, the next tile's rows are in the ring
    const int begin = block.first + i == 0 ? 0 : at.begin;
    store_row_segments(layout, args.data_t, opaque(block.strip) * kTile, begin, shared.tiles[i + 1].begin,
                       at.begin, (at.rows + kRowsPerThread - 1) / kRowsPerThread, shared.transposed_tile);
  }
}

template <DType element, typename T, ScaleGranularity granularity, typename Shared = AlignedTransposeShared>
void launch_aligned_transpose(const QuantizeArgs& args, cudaStream_t stream) {
  static DynamicSharedMemory shared_memory;
  constexpr auto kernel = aligned_transpose_kernel<element, T, granularity, Shared>;
  shared_memory.allow(kernel, sizeof(Shared));
  const Layout& layout = args.layout;
  const int64_t parts = std::max(ceil_div(ceil_div(layout.rows, kTile), kTilesPerPart),
                                 ceil_div(layout.row_tiles(), kAlignedTiles));
  launch_pdl(kernel, static_cast<unsigned>(layout.col_tiles() * parts), kThreads, sizeof(Shared), stream,
             args);
  check_launch("aligned_transpose_kernel");
}

}  // namespace transformer_plugin::quantize
