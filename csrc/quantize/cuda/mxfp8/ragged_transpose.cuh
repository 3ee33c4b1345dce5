// Ragged groups that begin anywhere, in both directions by microscaling: blocks take windows of 128 rows of the buffer.
//
// A line of transposed data belongs to one column and holds its rows one after the other, those of all groups. Tiles that
// begin with groups would leave parts of 32 bytes of it to two blocks, each a transaction of its own. A window begins at a
// multiple of 128 of the buffer, so that its lines are whole wherever groups begin. What it does not hold are rows that are in
// one 1x32 block of a column with some of its own: up to 31 above and as many below, which are read for their maxima alone.
// The window that has a block's first row stores its scale.
//
// As in tile_device.cuh a warp has 16 rows, its slot of the window, and a lane 4 columns. Blocks of columns may begin in any
// row, so that a slot has rows of a block that begins above (its head), of one that ends below (its tail: all rows of a slot
// in which none begins are both), and between them, of tiny groups, of any number of others.
#pragma once

#include "quantize/cuda/mxfp8/ragged_transpose_tiles.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

// Largest magnitudes of a lane's columns.
template <typename T>
struct ColumnMaxima {
  static_assert(sizeof(T) == 2, "two of them in a register");
  Two<T> at[kColsPerThread / 2] = {zeros<T>(), zeros<T>()};

  __device__ __forceinline__ void add(const Two<T> (&values)[kColsPerThread / 2]) {
#pragma unroll
    for (int i = 0; i < kColsPerThread / 2; ++i) at[i] = larger_magnitudes(at[i], values[i]);
  }
  __device__ __forceinline__ void add(const uint2& vector) {
    Two<T> values[kColsPerThread / 2];
    memcpy(values, &vector, sizeof(vector));
    add(values);
  }
  __device__ __forceinline__ uint2 vector() const {
    uint2 vector;
    memcpy(&vector, at, sizeof(vector));
    return vector;
  }
  // The exponents of the scales, the first column's in the lowest byte.
  template <DType element>
  __device__ __forceinline__ uint32_t exponents() const {
    Codes4 codes;
#pragma unroll
    for (int i = 0; i < kColsPerThread / 2; ++i) {
      const float2 two = to_floats(at[i]);
      codes.word |= quick_e8m0_bits<element>(fabsf(two.x)) >> 23 << (16 * i);
      codes.word |= quick_e8m0_bits<element>(fabsf(two.y)) >> 23 << (16 * i + 8);
    }
    return codes.word;
  }
};

struct MxWindowShared {
  TransposedTile turned;
  alignas(16) uint8_t exponents[kTile][kTile];  // of the block that begins in a row, for each column
  uint2 heads[kWarps][kWarpSize];  // ColumnMaxima of a slot's head; none if a block begins with it
  uint2 tails[kWarps][kWarpSize];
  uint2 above[kWarps][kWarpSize];  // a share of the rows above the window each
  uint2 below[kWarps][kWarpSize];
  int32_t used;  // row tiles of the matrix that hold rows

  // Of what is in one block with the rows before the slot, of what is with those after it.
  template <typename T>
  __device__ __forceinline__ void add_head(ColumnMaxima<T>& maxima, int slot, int lane) const {
    slot < kWarps ? maxima.add(heads[slot][lane]) : add_all(maxima, below, lane);
  }
  template <typename T>
  __device__ __forceinline__ void add_tail(ColumnMaxima<T>& maxima, int slot, int lane) const {
    slot >= 0 ? maxima.add(tails[slot][lane]) : add_all(maxima, above, lane);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void add_all(ColumnMaxima<T>& maxima,
                                                 const uint2 (&shares)[kWarps][kWarpSize], int lane) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) maxima.add(shares[i][lane]);
  }
};

// Bytes `from` to `to` of a word.
__device__ __forceinline__ void store_part_of_word(uint8_t* target, uint32_t word, int from, int to) {
  if (to - from == 4) return store_kept(target, word);
  if (from % 2 != 0) {
    store_kept(target + from, static_cast<uint8_t>(word >> (8 * from)));
    ++from;
  }
  if (to - from >= 2) {
    store_kept(target + from, static_cast<uint16_t>(word >> (8 * from)));
    from += 2;
  }
  if (from < to) store_kept(target + from, static_cast<uint8_t>(word >> (8 * from)));
}

// The scales of blocks of columns that begin in the window. Half of the block's threads take the lines of the tiles of even
// numbers, a line each, and the others the rest. The last block of a tile zeroes what is left of its word.
__device__ __forceinline__ void write_window_exponents(const QuantizeArgs& args, const Tile& window,
                                                       int row_tile, WindowTile tiles, int warp, int lane,
                                                       const MxWindowShared& shared) {
  const int column = threadIdx.x % kTile;
  const bool tiled = args.layout.tiled;
  Tile first = window;
  first.row_tile = row_tile;
  uint8_t* target = args.exponents_t + WordLines(args.layout, first, true).at(column);
#pragma unroll 1
  for (;;) {
    const bool more = tiles.more();
    const int count = __popc(__ballot_sync(0xffffffffu, tiles.begin() < kTile));
#pragma unroll 1
    for (int i = warp / (kWarps / 2); i < count; i += 2) {
      WindowTile at = tiles;
      at.packed = __shfl_sync(0xffffffffu, tiles.packed, i);
      const int begin = at.begin(), blocks = at.blocks();
      uint32_t word = 0;
      int from = kMxBlocks, to = 0;
#pragma unroll
      for (int block = kMxBlocks - 1; block >= 0; --block) {
        const int row = begin + block * kMxBlock;
        if (block >= blocks || static_cast<uint32_t>(row) >= kTile) continue;
        word |= static_cast<uint32_t>(shared.exponents[row][column]) << (8 * block);
        from = block;
        to = max(to, block + 1);
      }
      if (from >= to) continue;
      store_part_of_word(target + (tiled ? i * 512 : i * 4), word, from, to == blocks ? kMxBlocks : to);
    }
    if (!more) return;
    row_tile += kWarpSize;
    target += tiled ? kWarpSize * 512 : kWarpSize * 4;
    tiles = WindowTile(lane_row_tile(args.layout, row_tile, lane), static_cast<int>(window.row));
  }
}

// The scales of a warp's rows, four of each in a word; those of two rows of its block stay with a lane, as multipliers. Rows
// past the matrix have scales of 0, up to a multiple of 128.
template <DType element, typename T>
__device__ __forceinline__ void write_row_exponents(const QuantizeArgs& args, const Tile& window,
                                                    const Values<T>& values, int warp, int lane,
                                                    float (&multipliers)[2]) {
  using Maxima = RowMaxima<kLanesPerBlock, T>;
  static_assert(Maxima::kCount == 2, "a lane answers for two rows");
  Maxima maxima;
  maxima.find(values, lane);
  const uint32_t first = quick_e8m0_bits<element>(maxima.amax(0)),
                 second = quick_e8m0_bits<element>(maxima.amax(1));
  multipliers[0] = quick_e8m0_multiplier(first);
  multipliers[1] = quick_e8m0_multiplier(second);
  // Bytes of both rows, of two blocks and then of four; even lanes of blocks make the first row's word, odd ones the second's.
  const int block = lane / kLanesPerBlock;
  const uint32_t own = first >> 23 | second >> 15;
  const uint32_t beside = __shfl_xor_sync(0xffffffffu, own, kLanesPerBlock);
  const uint32_t two = block % 2 == 0 ? own | beside << 16 : beside | own << 16;
  const uint32_t others = __shfl_xor_sync(0xffffffffu, two, 2 * kLanesPerBlock);
  const int row = warp * kRowsPerThread + Maxima::first_of(lane) + block;
  if (block < 2) {
    store_kept(args.exponents + WordLines(args.layout, window, false).at(row),
               __byte_perm(two, others, block == 0 ? 0x6420 : 0x7531));
  }
}

// Rows of a lane's columns.
struct LaneRows {
  const char* first;
  uint32_t pitch;

  __device__ __forceinline__ uint2 at(int row) const {
    return __ldg(reinterpret_cast<const uint2*>(step_to(first, pitch, static_cast<uint32_t>(row))));
  }
};

// Maxima of the warp's share of the `above` rows before the window and the `below` rows after it. Together they are mostly as
// many as a block has.
template <typename T>
__device__ __forceinline__ void find_outside(LaneRows rows, bool has_columns, int above, int below, int warp,
                                             int lane, MxWindowShared& shared) {
  ColumnMaxima<T> of_above, of_below;
  rows.first -= above * static_cast<int64_t>(rows.pitch);
#pragma unroll 1
  for (int first = warp; first < above + below; first += kMxBlock) {
    uint2 vectors[kMxBlock / kWarps] = {};
#pragma unroll
    for (int i = 0; i < kMxBlock / kWarps; ++i) {
      const int number = first + i * kWarps;
      if (has_columns && number < above + below)
        vectors[i] = rows.at(number < above ? number : number + kTile);
    }
#pragma unroll
    for (int i = 0; i < kMxBlock / kWarps; ++i) {
      const bool is_above = first + i * kWarps < above;
      is_above ? of_above.add(vectors[i]) : of_below.add(vectors[i]);
    }
  }
  shared.above[warp][lane] = of_above.vector();
  shared.below[warp][lane] = of_below.vector();
}

template <DType element, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    quantize_mx_windows_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ MxWindowShared shared;
  pdl_wait();
  if (args.is_noop()) return;
  const Layout& layout = args.layout;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
  const uint32_t strips = static_cast<uint32_t>(layout.col_tiles());
  const int index = static_cast<int>(blockIdx.x / strips), row = index * kTile;
  const Window window = load_entry<uint2>(layout.windows, index);
  Window after = {};
  if (index + 1 < static_cast<int>(Layout::window_count(layout.rows)))
    after = load_entry<uint2>(layout.windows, index + 1);
  Tile tile = {};
  tile.row_tile = index;
  tile.col_tile = static_cast<int32_t>(blockIdx.x % strips);
  tile.row = row;
  tile.col = static_cast<int64_t>(tile.col_tile) * kTile;
  tile.rows = static_cast<int>(min(layout.rows - tile.row, int64_t{kTile}));
  tile.cols = static_cast<int>(min(layout.cols - tile.col, int64_t{kTile}));

  const RowTile own_tile = lane_row_tile(layout, window.row_tile, lane);  // looked at after all loads
  const uint32_t pitch = static_cast<uint32_t>(layout.cols * sizeof(T));
  const bool has_columns = lane * kColsPerThread < tile.cols;
  const char* const tile_columns = static_cast<const char*>(args.input) + tile.row * pitch +
                                   (tile.col + lane * kColsPerThread) * static_cast<int64_t>(sizeof(T));
  const int first_row = warp * kRowsPerThread;
  const LaneRows window_rows{tile_columns, pitch};
  const LaneRows slot_rows{step_to(tile_columns, pitch, static_cast<uint32_t>(first_row)), pitch};
  Values<T> values;
  if (window.held >= first_row + kRowsPerThread && tile.cols == kTile) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const uint2 vector = slot_rows.at(r);
      memcpy(values.at[r], &vector, sizeof(vector));
    }
  } else {
    const int held = has_columns ? window.held - first_row : 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      uint2 vector = {};
      if (r < held) vector = slot_rows.at(r);
      memcpy(values.at[r], &vector, sizeof(vector));
    }
  }
  find_outside<T>(window_rows, has_columns, window.above, after.below, warp, lane, shared);
  const WindowTile tiles(own_tile, row);
  if (threadIdx.x == 0) shared.used = own_tile.used;

  const SlotBegins begins(layout, tiles, window.row_tile, row, first_row, lane);
  const uint32_t starts = begins.rows;

  ColumnMaxima<T> head, tail;
  const int last_start = starts == 0 ? 0 : 31 - __clz(starts);
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
    // Blocks of tiny groups, which begin and end in the slot. Rows of registers have no numbers: they are read again.
#pragma unroll 1
    for (uint32_t left = starts; (left & (left - 1)) != 0; left &= left - 1) {
      const int from = __ffs(left) - 1, to = __ffs(left & (left - 1)) - 1;
      ColumnMaxima<T> maxima;
#pragma unroll 1
      for (int r = from; r < to; ++r) {
        if (has_columns && first_row + r < window.held) maxima.add(slot_rows.at(r));
      }
      *reinterpret_cast<uint32_t*>(&shared.exponents[first_row + from][lane * kColsPerThread]) =
          maxima.template exponents<element>();
    }
  }
  shared.heads[warp][lane] = head.vector();
  shared.tails[warp][lane] = tail.vector();
  float of_rows[2] = {};
  if (args.rowwise) write_row_exponents<element>(args, tile, values, warp, lane, of_rows);
  __syncthreads();  // maxima of all slots

  float of_columns[kColsPerThread] = {};
  const auto take = [&](uint32_t exponents) {
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      const uint32_t bits = c < 3 ? exponents << (23 - 8 * c) : exponents >> 1;
      of_columns[c] = quick_e8m0_multiplier(bits & 0x7f800000u);
    }
  };
  if (starts != 0) {  // the block that begins last may end in the next slot or in the one after that
    shared.add_head(tail, warp + 1, lane);
    if (!begins.any_after && warp + 1 < kWarps) shared.add_head(tail, warp + 2, lane);
    *reinterpret_cast<uint32_t*>(&shared.exponents[first_row + last_start][lane * kColsPerThread]) =
        tail.template exponents<element>();
  }
  if (starts % 2 == 0) {  // the first row's begins in the slot before or in the one before that
    shared.add_tail(head, warp - 1, lane);
    if (!begins.any_before && warp > 0) shared.add_tail(head, warp - 2, lane);
    if (starts == 0) shared.add_head(head, warp + 1, lane);
    take(head.template exponents<element>());
  }

  uint32_t words[kColsPerThread][kRowsPerThread / 4] = {};
  const int stored = args.rowwise && has_columns ? tile.rows - first_row : 0;
  uint8_t* target = args.data + (tile.row + first_row) * layout.cols + tile.col + lane * kColsPerThread;
#pragma unroll
  for (int pair = 0; pair < kRowsPerThread / 2; ++pair) {
    float scaled[2][kColsPerThread];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * pair + i;
      if (starts & (1u << r)) {
        take(*reinterpret_cast<const uint32_t*>(&shared.exponents[first_row + r][lane * kColsPerThread]));
      }
      const float of_row =
          __shfl_sync(0xffffffffu, of_rows[i], RowMaxima<kLanesPerBlock, T>::lane_of(r), kLanesPerBlock);
      float own[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        own[c] = values.get(r, c);
        scaled[i][c] = own[c] * of_columns[c];
      }
      const Codes4 codes =
          encode4<element>(own[0] * of_row, own[1] * of_row, own[2] * of_row, own[3] * of_row);
      if (r < stored) *reinterpret_cast<uint32_t*>(target + r * layout.cols) = codes.word;
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      words[c][pair / 2] |= encode2<element>(scaled[0][c], scaled[1][c]) << (16 * (pair % 2));
    }
  }
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    shared.turned.chunk(lane * kColsPerThread + c, warp) =
        make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
  }
  __syncthreads();  // codes of lines, exponents of blocks
  store_lines(args, tile, warp, lane, shared.turned);
  write_window_exponents(args, tile, window.row_tile, tiles, warp, lane, shared);
  // Words of the row tiles that hold nothing.
  if (static_cast<int64_t>(shared.used) < layout.row_tiles()) {
    zero_unused_words(layout, shared.used, args.exponents_t, blockIdx.x * kThreads + threadIdx.x,
                      gridDim.x * kThreads);
  }
}

}  // namespace transformer_plugin::quantize
