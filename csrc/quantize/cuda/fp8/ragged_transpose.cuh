// Quantizes ragged groups to FP8 in both directions, or only to transposed data, where groups begin at any
// row.
//
//   data[row][column]   = fp8(x * scale of the row's 1x128 block)        [rows, cols]
//   data_t[column][row] = fp8(x * scale of the column's 1x128 block)     [cols, rows]
// with one scale for the group in both directions for ScaleGranularity::kPerTensor. Input: [rows, cols] in
// BF16 or FP16. Scales as in quantize/args/layout.h; blocks of a column begin with its group.
// quantize/cuda/fp8/aligned_transpose.cuh is the variant for the `aligned` layout.
//
// Problem: a row of transposed data holds the rows of all groups one after the other. A kernel that stores
// one tile at a time leaves parts of 32-byte sectors to two blocks wherever a group does not begin at a
// multiple of 32, and each part is a separate memory transaction. This kernel stores whole 128-byte cache
// lines.
//
// Grid: one-dimensional, column tiles (128 columns) times parts. A part is a range of consecutive row tiles;
// one block processes the row tiles of its part in order for one column tile. Block: 288 threads, 9 warps.
// Each warp holds one segment of 16 rows that begins at a multiple of 16 of the buffer, so that its
// transposed data is whole 16-byte chunks wherever the tile begins; 128 rows lie in up to 9 segments. A lane
// holds 4 columns.
//
// Dynamic shared memory (RaggedTransposeShared): a ring of 128 input rows that cp.async fills ahead of the
// tile being processed, and two cache lines of transposed data per column: one that is not complete yet, and
// the current tile's.
#pragma once

#include <cstdint>

#include "common/ptx/cp_async.cuh"
#include "quantize/cuda/fp8/segment.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kSegments = kTile / kRowsPerThread + 1;
inline constexpr int kRaggedThreads = kSegments * kWarpSize;
inline constexpr int kRaggedBlocksPerSm = 3;
inline constexpr int kCacheLine = 128;                         // bytes
inline constexpr int kColumnChunks = 2 * kCacheLine / kChunk;  // chunks in shared memory per column
// Odd, so that neighbouring lanes have no bank conflicts.
inline constexpr int kColumnStride = kColumnChunks + 1;

// To a multiple of a power of two.
__device__ __forceinline__ int round_down(int value, int multiple) { return value & -multiple; }

struct RaggedTransposeShared {
  alignas(16) uint16_t ring[kRing][kTile];
  uint4 chunks[kTile * kColumnStride];
  alignas(16) float partial[kSegments][kTile];  // amax of each column over the rows of a segment
  alignas(16) float scales[kTile];              // of the columns

  // The chunk of transposed data of `column` that holds this row of the buffer.
  __device__ __forceinline__ uint4& chunk(int column, int row) {
    return chunks[(column % kColsPerThread * kWarpSize + column / kColsPerThread) * kColumnStride +
                  static_cast<uint32_t>(row) / kChunk % kColumnChunks];
  }
};

// Stores bytes `from` to `to` of a chunk in as few stores as their alignment allows. Other blocks store the
// rest.
__device__ __forceinline__ void store_part_of_chunk(uint8_t* target, const uint4& chunk, int from, int to) {
  const uint8_t* source = reinterpret_cast<const uint8_t*>(&chunk);
  const auto store = [&](auto word, bool wanted) {
    constexpr int kSize = sizeof(word);
    if (!wanted || to - from < kSize) return;
    store_evict_last(target + from, *reinterpret_cast<const decltype(word)*>(source + from));
    from += kSize;
  };
  store(uint8_t{}, from % 2 != 0);  // up to a multiple of 8, then in ever smaller pieces
  store(uint16_t{}, from % 4 != 0);
  store(uint32_t{}, from % 8 != 0);
  store(uint2{}, true);
  store(uint32_t{}, true);
  store(uint16_t{}, true);
  store(uint8_t{}, true);
}

// The share of one block: row tiles `first` to `last` for the columns from `col` on.
struct RaggedBlock {
  int strip;  // column tile
  int col, cols;
  int first, last;
  int begin_row, end_row;
  int segment, lane;
  bool has_columns;  // whether the lane's columns are in the matrix

  __device__ __forceinline__ bool empty() const { return first >= last; }
};

// Zeroes the column scales of row tiles that hold no rows, and returns the share of this block. Where every
// group begins at a multiple of 32 rows, no two parts share a sector: parts may end anywhere, and every block
// has one, because short parts side by side in memory are faster. Elsewhere each end of a part costs stores
// of a few bytes: there are only `unaligned_parts` parts, and the other blocks have none.
template <bool blocks>
__device__ __forceinline__ RaggedBlock begin_ragged_block(const QuantizeArgs& args, int unaligned_parts) {
  const Layout& layout = args.layout;
  RaggedBlock block;
  block.segment = warp_uniform(static_cast<int>(threadIdx.x / kWarpSize));
  block.lane = threadIdx.x % kWarpSize;
  const int col_tiles = static_cast<int>(layout.col_tiles());
  block.strip = static_cast<int>(blockIdx.x) % col_tiles;
  const int part = static_cast<int>(blockIdx.x) / col_tiles;
  block.col = block.strip * kTile;
  block.cols = min(kTile, static_cast<int>(layout.cols) - block.col);
  const RowTile* table = layout.row_tile_table;
  const int used = warp_uniform(table[0].used_row_tiles);
  const bool aligned = warp_uniform(table[0].all_groups_aligned) && layout.rows % kAlignedRows == 0;
  const int parts_in_grid = static_cast<int>(gridDim.x) / col_tiles;
  const int parts = aligned ? parts_in_grid : unaligned_parts;
  if (blocks && layout.zero_tail) {
    for (int index = used + part; index < static_cast<int>(layout.row_tiles()); index += parts_in_grid) {
      if (threadIdx.x < block.cols) {
        args.scale_t[index * round_up_4(layout.cols) + block.col + threadIdx.x] = 0.0f;
      }
    }
  }
  block.first = first_of_part(part, parts, used);
  block.last = part < parts ? first_of_part(part + 1, parts, used) : block.first;
  return block;
}

// Copies input rows into the ring by cp.async, 16 bytes per thread: the row of the buffer determines its
// place.
template <typename T>
struct RowLoader {
  static constexpr int kPieces = kTile * sizeof(T) / 16;  // of 16 bytes in a row
  static constexpr int kRowsAtOnce = kRaggedThreads / kPieces;
  int row, end;  // the next row of this thread, and where it stops
  uint32_t pitch, ring;
  const char* source;

  __device__ __forceinline__ RowLoader(const QuantizeArgs& args, const RaggedBlock& block,
                                       RaggedTransposeShared& shared) {
    const int piece = threadIdx.x % kPieces;
    pitch = static_cast<uint32_t>(args.layout.cols * sizeof(T));
    end = piece * (16 / static_cast<int>(sizeof(T))) < block.cols ? block.end_row : 0;
    row = block.begin_row + static_cast<int>(threadIdx.x / kPieces);
    source = static_cast<const char*>(args.input) + static_cast<int64_t>(block.col) * sizeof(T) +
             static_cast<int64_t>(row) * pitch + piece * 16;
    ring = shared_address(shared.ring) + piece * 16;
  }

  __device__ __forceinline__ void load_until(int limit) {
    limit = min(limit, end);
#pragma unroll 4
    while (row < limit) {
      ptx::cp_async(ring + static_cast<uint32_t>(row) % kRing *
                               static_cast<uint32_t>(sizeof(RaggedTransposeShared::ring[0])),
                    source);
      row += kRowsAtOnce;
      source += pitch * static_cast<uint32_t>(kRowsAtOnce);
    }
  }
};

// The rows of one segment that belong to the current row tile.
struct SegmentRows {
  int row;         // the segment's first, in the buffer
  int low;         // rows of the segment before the tile
  uint32_t valid;  // bit mask

  __device__ __forceinline__ SegmentRows(const RowTile& tile, int segment)
      : row(round_down(tile.row, kChunk) + segment * kChunk), low(max(0, tile.row - row)) {
    const int high = min(kChunk, tile.row + tile.rows - row);
    valid = high > low ? (0xffffu >> (kRowsPerThread - high)) & (0xffffu << low) : 0;
  }
};

// From the ring to registers: zero for rows outside of the tile, for columns outside of the matrix, and for
// the tail.
template <typename T>
__device__ __forceinline__ void load_segment(const RaggedBlock& block, const SegmentRows& rows, bool tail,
                                             const RaggedTransposeShared& shared, TileFragment<T>& values) {
  const char* source = reinterpret_cast<const char*>(shared.ring[static_cast<uint32_t>(rows.row) % kRing]) +
                       block.lane * sizeof(Vector4<T>);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const auto vector = *reinterpret_cast<const Vector4<T>*>(source + r * sizeof(shared.ring[0]));
    memcpy(values.at[r], &vector, sizeof(vector));
  }
  if (rows.valid != 0xffffu || tail || block.cols != kTile) {
    const uint32_t filled = tail || !block.has_columns ? 0 : rows.valid;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (!(filled & (1u << r))) values.at[r][0] = values.at[r][1] = zeros<T>();
    }
  }
}

// Finds and stores the scales of the columns, then those of the segment's rows. Returns the scale of the row
// that the lane holds. The column scales are in shared memory after the next barrier.
template <typename T>
__device__ __forceinline__ float find_segment_scales(const QuantizeArgs& args, const RaggedBlock& block,
                                                     const SegmentRows& rows, bool tail,
                                                     const TileFragment<T>& values, float* row_scales,
                                                     float*& column_scales, int64_t column_scales_width,
                                                     RaggedTransposeShared& shared) {
  if (threadIdx.x < kTile) {
    float largest = shared.partial[0][threadIdx.x];
#pragma unroll
    for (int s = 1; s < kSegments; ++s) largest = fmaxf(largest, shared.partial[s][threadIdx.x]);
    const float scale = encode_scale(largest, args.rule);
    shared.scales[threadIdx.x] = scale;
    if (threadIdx.x < block.cols) *column_scales = tail ? 0.0f : 1.0f / scale;
    column_scales += column_scales_width;
  }
  float row_scale = 1.0f;
  if (args.rowwise && rows.valid != 0) {
    row_scale = segment_row_scale(values, block.lane, args.rule);
    const int own = RowMaxima<kRowsPerThread, T>::first_of(block.lane);
    if (block.lane < kRowsPerThread && (rows.valid >> own & 1)) {
      row_scales[rows.row + own] = tail ? 0.0f : 1.0f / row_scale;
    }
  }
  return row_scale;
}

// Encodes the segment: row-wise data to memory, transposed data to shared memory. `continues` says that the
// previous tile ended in the chunk in which this tile begins.
template <DType element, bool blocks, typename T>
__device__ __forceinline__ void write_segment(const QuantizeArgs& args, const RaggedBlock& block,
                                              const SegmentRows& rows, const TileFragment<T>& values,
                                              float row_scale, int index, uint8_t* data,
                                              RaggedTransposeShared& shared) {
  float4 of_columns = make_float4(row_scale, row_scale, row_scale, row_scale);
  if (blocks) of_columns = *reinterpret_cast<const float4*>(&shared.scales[block.lane * kColsPerThread]);
  const float scales[kColsPerThread] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
  const uint32_t written = args.rowwise && block.has_columns ? rows.valid : 0;
  const uint32_t step = static_cast<uint32_t>(args.layout.cols);
  uint32_t words[kColsPerThread][kRowsPerThread / 4];
  encode_segment<element, blocks>(values, row_scale, scales, written,
                                  data + static_cast<int64_t>(rows.row) * step, step, words);
  if (block.segment == 0 && rows.low != 0 && index != block.first) {  // the previous tile ended in this chunk
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      const uint4 before = shared.chunk(block.lane * kColsPerThread + c, rows.row);
      words[c][0] |= before.x;
      words[c][1] |= before.y;
      words[c][2] |= before.z;
      words[c][3] |= before.w;
    }
  }
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    shared.chunk(block.lane * kColsPerThread + c, rows.row) =
        make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
  }
}

// Stores the transposed data of rows `stored_row` to `ready` from shared memory: whole chunks, then the
// partial chunks at the ends of the part, which other blocks complete. `stop` is the row after the current
// tile.
__device__ __forceinline__ void store_ready_rows(const Layout& layout, const RaggedBlock& block,
                                                 uint8_t* data_t, int stored_row, int ready, int stop,
                                                 bool at_end, RaggedTransposeShared& shared) {
  const int begin_row = block.begin_row;
  for (int base = round_down(stored_row, kCacheLine); base < ready; base += kCacheLine) {
    const int row = base + block.lane % 8 * kChunk, first_column = block.segment * 4 + block.lane / 8;
    const bool whole = row >= begin_row && row + kChunk <= ready;
    uint8_t* target = data_t + first_column * layout.rows + row;
    for (int column = first_column; column < block.cols;
         column += kSegments * 4, target += kSegments * 4 * layout.rows) {
      if (whole) *reinterpret_cast<uint4*>(target) = shared.chunk(column, row);
    }
  }
  if (threadIdx.x < block.cols) {
    const int column = threadIdx.x;
    bool wanted = stored_row == begin_row && begin_row % kChunk != 0;
    int chunk_row = round_down(begin_row, kChunk);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      if (wanted) {
        store_part_of_chunk(data_t + column * layout.rows + chunk_row, shared.chunk(column, chunk_row),
                            max(begin_row - chunk_row, 0), min(ready - chunk_row, kChunk));
      }
      const int last_row = round_down(stop, kChunk);
      wanted = at_end && stop != last_row && !(wanted && last_row == chunk_row);
      chunk_row = last_row;
    }
  }
}

template <DType element, typename T, ScaleGranularity granularity>
__global__ void __launch_bounds__(kRaggedThreads, kRaggedBlocksPerSm)
    ragged_transpose_kernel(const __grid_constant__ QuantizeArgs args, int unaligned_parts) {
  static_assert(sizeof(T) == 2, "the ring holds 16-bit values");
  constexpr bool kBlocks = granularity == ScaleGranularity::k1x128;
  extern __shared__ uint4 dynamic_shared[];
  RaggedTransposeShared& shared = *reinterpret_cast<RaggedTransposeShared*>(dynamic_shared);
  pdl_wait();
  if (args.is_noop()) return;
  if (!kBlocks) store_tensor_scales(args);
  const Layout& layout = args.layout;
  RaggedBlock block = begin_ragged_block<kBlocks>(args, unaligned_parts);
  if (block.empty()) return;
  const RowTile end_tile = warp_uniform(layout.row_tile_table[block.last - 1]);
  block.begin_row = warp_uniform(layout.row_tile_table[block.first].row);
  block.end_row = end_tile.row + end_tile.rows;
  block.has_columns = block.lane * kColsPerThread < block.cols;
  const int64_t column_scales_width = round_up_4(layout.cols);
  RowLoader<T> loader(args, block, shared);
  loader.load_until(block.begin_row + kRing);

  uint8_t* data_t = args.data_t + static_cast<int64_t>(block.col) * layout.rows;
  uint8_t* data = args.data + block.col + block.lane * kColsPerThread;
  float* row_scales = args.scale + static_cast<int64_t>(block.strip) * round_up_4(layout.rows);
  float* column_scales = args.scale_t + block.first * round_up_4(layout.cols) + block.col + threadIdx.x;
  RowTile next = layout.row_tile_table[block.first];
  int stored_row = block.begin_row;  // transposed data is stored up to this row
  for (int index = block.first; index < block.last; ++index) {
    const RowTile at = warp_uniform(next);
    if (index + 1 < block.last) next = layout.row_tile_table[index + 1];
    const bool tail = at.group == layout.groups;
    ptx::cp_async_wait_all();
    __syncthreads();  // the tile's rows are in the ring, and chunks that were stored may be overwritten

    const SegmentRows rows(at, block.segment);
    TileFragment<T> values;
    load_segment(block, rows, tail, shared, values);
    if (kBlocks) {
      const float2 left = values.column_max(0), right = values.column_max(1);
      *reinterpret_cast<float4*>(&shared.partial[block.segment][block.lane * kColsPerThread]) =
          make_float4(left.x, left.y, right.x, right.y);
    }
    __syncthreads();  // values are in registers, maxima of segments in shared memory
    loader.load_until(at.row + at.rows + kRing);

    float row_scale = 1.0f;
    if (kBlocks) {
      row_scale = find_segment_scales(args, block, rows, tail, values, row_scales, column_scales,
                                      column_scales_width, shared);
      __syncthreads();  // column scales are in shared memory
    } else if (!tail) {
      row_scale = tensor_scale(args, at.group);
    }
    if (rows.valid != 0) {
      write_segment<element, kBlocks>(args, block, rows, values, row_scale, index, data, shared);
    }

    const bool at_end = index + 1 == block.last;
    const int stop = at.row + at.rows, ready = at_end ? stop : round_down(stop, kCacheLine);
    if (ready <= stored_row) continue;
    __syncthreads();  // transposed data is in shared memory
    store_ready_rows(layout, block, data_t, stored_row, ready, stop, at_end, shared);
    stored_row = ready;
  }
}

}  // namespace transformer_plugin::quantize
