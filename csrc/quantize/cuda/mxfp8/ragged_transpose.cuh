// Quantizes ragged groups to MXFP8 in both directions, or only to transposed data, where groups begin at any
// row.
//
//   data[row][column]   = fp8(x * 2^(127 - e)), e the E8M0 exponent of the row's 1x32 block   [rows, cols]
//   data_t[column][row] = the same with the exponent of the column's 1x32 block               [cols, rows]
// Input: [rows, cols] in BF16 or FP16. Exponents as in quantize/args/layout.h; blocks of a column begin with
// its group.
//
// Problem: a row of transposed data holds the rows of all groups one after the other. Tiles that begin with
// groups would leave parts of 32-byte sectors to two blocks, each part a separate memory transaction. This
// kernel processes strips of 128 rows counted from the start of the buffer, so that it stores whole cache
// lines wherever groups begin. A 1x32 block of a column may extend beyond the strip, by up to 31 rows before
// it and as many after it: those rows are read only for their maxima. The strip that holds the first row of a
// block stores its exponent.
//
// Grid: one block of 256 threads per strip and column tile. Warp w holds a segment of 16 rows, 16w .. 16w +
// 15 of the strip, and lane l the columns 4l .. 4l + 3, as in quantize/cuda/tile/tile.cuh. Blocks of columns
// may begin in any row, so a segment has a head (rows of a block that begins before it), a tail (rows of a
// block that ends after it; if no block begins in the segment, all its rows are both), and between them, for
// tiny groups, whole blocks.
//
// Shared memory (MxStripShared): the transposed tile, exponents of column blocks, and maxima of heads, tails
// and rows outside of the strip.
#pragma once

#include "quantize/cuda/mxfp8/ragged_exponents.cuh"

namespace transformer_plugin::quantize {

// Pointer to a lane's 4 columns of a range of rows.
struct LaneRows {
  const char* first;
  uint32_t pitch;

  __device__ __forceinline__ uint2 at(int row) const {
    return __ldg(reinterpret_cast<const uint2*>(step_to(first, pitch, static_cast<uint32_t>(row))));
  }
};

// Finds the maxima of the warp's share of the `rows_before` rows before the strip and the `rows_after` rows
// after it.
template <typename T>
__device__ __forceinline__ void find_outside_maxima(LaneRows rows, bool has_columns, int rows_before,
                                                    int rows_after, int warp, int lane,
                                                    MxStripShared& shared) {
  ColumnMaxima<T> before, after;
  rows.first -= rows_before * static_cast<int64_t>(rows.pitch);
#pragma unroll 1
  for (int first = warp; first < rows_before + rows_after; first += kMxBlock) {
    uint2 vectors[kMxBlock / kWarps] = {};
#pragma unroll
    for (int i = 0; i < kMxBlock / kWarps; ++i) {
      const int number = first + i * kWarps;
      if (has_columns && number < rows_before + rows_after)
        vectors[i] = rows.at(number < rows_before ? number : number + kTile);
    }
#pragma unroll
    for (int i = 0; i < kMxBlock / kWarps; ++i) {
      const bool is_before = first + i * kWarps < rows_before;
      is_before ? before.add(vectors[i]) : after.add(vectors[i]);
    }
  }
  shared.before[warp][lane] = before.vector();
  shared.after[warp][lane] = after.vector();
}

// The strip and the position of a thread in it.
struct MxStrip {
  Tile tile;  // the strip as a tile: `row_tile` is the number of the strip
  RowStrip rows;
  int warp, lane, first_row;
  bool has_columns;

  __device__ __forceinline__ explicit MxStrip(const Layout& layout)
      : tile(), warp(__shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0)), lane(threadIdx.x % kWarpSize) {
    const uint32_t col_tiles = static_cast<uint32_t>(layout.col_tiles());
    const int index = static_cast<int>(blockIdx.x / col_tiles), row = index * kTile;
    rows = load_entry<uint2>(layout.row_strips, index);
    tile.row_tile = index;
    tile.col_tile = static_cast<int32_t>(blockIdx.x % col_tiles);
    tile.row = row;
    tile.col = static_cast<int64_t>(tile.col_tile) * kTile;
    tile.rows = static_cast<int>(min(layout.rows - tile.row, int64_t{kTile}));
    tile.cols = static_cast<int>(min(layout.cols - tile.col, int64_t{kTile}));
    first_row = warp * kRowsPerThread;
    has_columns = lane * kColsPerThread < tile.cols;
  }
};

// The warp's segment: zero for rows that belong to no group and columns outside of the matrix.
template <typename T>
__device__ __forceinline__ void load_segment(const MxStrip& strip, const LaneRows& segment_rows,
                                             TileFragment<T>& values) {
  if (strip.rows.group_rows >= strip.first_row + kRowsPerThread && strip.tile.cols == kTile) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const uint2 vector = segment_rows.at(r);
      memcpy(values.at[r], &vector, sizeof(vector));
    }
  } else {
    const int valid = strip.has_columns ? strip.rows.group_rows - strip.first_row : 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      uint2 vector = {};
      if (r < valid) vector = segment_rows.at(r);
      memcpy(values.at[r], &vector, sizeof(vector));
    }
  }
}

// Finds the maxima of the segment's head and tail, and the exponents of blocks that begin and end within the
// segment.
template <DType element, typename T>
__device__ __forceinline__ void find_segment_maxima(const MxStrip& strip, const LaneRows& segment_rows,
                                                    const TileFragment<T>& values, uint32_t starts,
                                                    int last_start, ColumnMaxima<T>& head,
                                                    ColumnMaxima<T>& tail, MxStripShared& shared) {
  if (last_start == 0) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) tail.add(values.at[r]);
    if (starts == 0) head = tail;
  } else {
    const int first_start = __ffs(starts) - 1;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (r < first_start) head.add(values.at[r]);
      if (r >= last_start) tail.add(values.at[r]);
    }
    // Blocks of tiny groups. Registers cannot be indexed by a variable, so the rows are read again.
#pragma unroll 1
    for (uint32_t left = starts; (left & (left - 1)) != 0; left &= left - 1) {
      const int from = __ffs(left) - 1, to = __ffs(left & (left - 1)) - 1;
      ColumnMaxima<T> maxima;
#pragma unroll 1
      for (int r = from; r < to; ++r) {
        if (strip.has_columns && strip.first_row + r < strip.rows.group_rows) maxima.add(segment_rows.at(r));
      }
      *reinterpret_cast<uint32_t*>(&shared.exponents[strip.first_row + from][strip.lane * kColsPerThread]) =
          maxima.template exponents<element>();
    }
  }
  shared.heads[strip.warp][strip.lane] = head.vector();
  shared.tails[strip.warp][strip.lane] = tail.vector();
}

// The multipliers of 4 columns from their exponents.
__device__ __forceinline__ void take_multipliers(uint32_t exponents, float (&of_columns)[kColsPerThread]) {
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    const uint32_t bits = c < 3 ? exponents << (23 - 8 * c) : exponents >> 1;
    of_columns[c] = quick_e8m0_multiplier(bits & 0x7f800000u);
  }
}

// Combines heads and tails of neighbouring segments: the exponents of the block that begins last in the
// segment, and in `of_columns` the multipliers for its first row. A block of 32 rows spans at most three
// segments.
template <DType element, typename T>
__device__ __forceinline__ void combine_segments(const MxStrip& strip, const SegmentBegins& begins,
                                                 int last_start, ColumnMaxima<T>& head, ColumnMaxima<T>& tail,
                                                 float (&of_columns)[kColsPerThread], MxStripShared& shared) {
  const uint32_t starts = begins.rows;
  const int warp = strip.warp, lane = strip.lane;
  if (starts != 0) {  // the block that begins last may end in the next segment or in the one after that
    shared.add_head(tail, warp + 1, lane);
    if (!begins.any_after && warp + 1 < kWarps) shared.add_head(tail, warp + 2, lane);
    *reinterpret_cast<uint32_t*>(&shared.exponents[strip.first_row + last_start][lane * kColsPerThread]) =
        tail.template exponents<element>();
  }
  if (starts % 2 ==
      0) {  // the block of the first row begins in the previous segment or in the one before that
    shared.add_tail(head, warp - 1, lane);
    if (!begins.any_before && warp > 0) shared.add_tail(head, warp - 2, lane);
    if (starts == 0) shared.add_head(head, warp + 1, lane);
    take_multipliers(head.template exponents<element>(), of_columns);
  }
}

// Encodes the segment: row-wise data to memory, transposed data to shared memory. `of_columns` changes at
// each row in which a block begins.
template <DType element, typename T>
__device__ __forceinline__ void write_segment(const QuantizeArgs& args, const MxStrip& strip,
                                              const TileFragment<T>& values, uint32_t starts,
                                              const float (&of_rows)[2], float (&of_columns)[kColsPerThread],
                                              MxStripShared& shared) {
  const Layout& layout = args.layout;
  const int lane = strip.lane;
  uint32_t words[kColsPerThread][kRowsPerThread / 4] = {};
  const int stored = args.rowwise && strip.has_columns ? strip.tile.rows - strip.first_row : 0;
  uint8_t* target =
      args.data + (strip.tile.row + strip.first_row) * layout.cols + strip.tile.col + lane * kColsPerThread;
#pragma unroll
  for (int pair = 0; pair < kRowsPerThread / 2; ++pair) {
    float scaled[2][kColsPerThread];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * pair + i;
      if (starts & (1u << r)) {
        take_multipliers(
            *reinterpret_cast<const uint32_t*>(&shared.exponents[strip.first_row + r][lane * kColsPerThread]),
            of_columns);
      }
      const float of_row =
          __shfl_sync(0xffffffffu, of_rows[i], RowMaxima<kLanesPerBlock, T>::lane_of(r), kLanesPerBlock);
      float own[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        own[c] = values.get(r, c);
        scaled[i][c] = own[c] * of_columns[c];
      }
      const Bytes4 bytes =
          encode4<element>(own[0] * of_row, own[1] * of_row, own[2] * of_row, own[3] * of_row);
      if (r < stored) *reinterpret_cast<uint32_t*>(target + r * layout.cols) = bytes.word;
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      words[c][pair / 2] |= encode2<element>(scaled[0][c], scaled[1][c]) << (16 * (pair % 2));
    }
  }
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    shared.transposed_tile.chunk(lane * kColsPerThread + c, strip.warp) =
        make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
  }
}

template <DType element, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    mx_ragged_transpose_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ MxStripShared shared;
  pdl_wait();
  if (args.is_noop()) return;
  const Layout& layout = args.layout;
  const MxStrip strip(layout);
  if (!layout.zero_tail && strip.rows.group_rows == 0) return;
  const Tile& tile = strip.tile;
  RowStrip next = {};
  if (tile.row_tile + 1 < static_cast<int>(Layout::row_strip_count(layout.rows)))
    next = load_entry<uint2>(layout.row_strips, tile.row_tile + 1);
  const int first_tile = strip.rows.first_row_tile;
  const RowTile lane_tile = lane_row_tile(layout, first_tile, strip.lane);  // used after all loads are issued
  const uint32_t pitch = static_cast<uint32_t>(layout.cols * sizeof(T));
  const char* const tile_columns = static_cast<const char*>(args.input) + tile.row * pitch +
                                   (tile.col + strip.lane * kColsPerThread) * static_cast<int64_t>(sizeof(T));
  const LaneRows strip_rows{tile_columns, pitch};
  const LaneRows segment_rows{step_to(tile_columns, pitch, static_cast<uint32_t>(strip.first_row)), pitch};
  TileFragment<T> values;
  load_segment(strip, segment_rows, values);
  find_outside_maxima<T>(strip_rows, strip.has_columns, strip.rows.block_rows_before, next.block_rows_from,
                         strip.warp, strip.lane, shared);
  const int strip_row = static_cast<int>(tile.row);
  const StripTile tiles(lane_tile, strip_row);
  if (threadIdx.x == 0) shared.used_row_tiles = lane_tile.used_row_tiles;

  const SegmentBegins begins(layout, tiles, first_tile, strip_row, strip.first_row, strip.lane);
  const uint32_t starts = begins.rows;
  const int last_start = starts == 0 ? 0 : 31 - __clz(starts);
  ColumnMaxima<T> head, tail;
  find_segment_maxima<element>(strip, segment_rows, values, starts, last_start, head, tail, shared);
  float of_rows[2] = {};
  if (args.rowwise) write_row_exponents<element>(args, tile, values, strip.warp, strip.lane, of_rows);
  __syncthreads();  // maxima of all segments are in shared memory

  float of_columns[kColsPerThread] = {};
  combine_segments<element>(strip, begins, last_start, head, tail, of_columns, shared);
  write_segment<element>(args, strip, values, starts, of_rows, of_columns, shared);
  __syncthreads();  // transposed data and exponents of blocks are in shared memory
  store_transposed_rows(args, tile, strip.warp, strip.lane, shared.transposed_tile);
  write_strip_exponents(args, tile, first_tile, tiles, strip.warp, strip.lane, shared);
  if (layout.zero_tail && static_cast<int64_t>(shared.used_row_tiles) < layout.row_tiles()) {
    zero_unused_words(layout, shared.used_row_tiles, args.exponents_t, blockIdx.x * kThreads + threadIdx.x,
                      gridDim.x * kThreads);
  }
}

}  // namespace transformer_plugin::quantize
