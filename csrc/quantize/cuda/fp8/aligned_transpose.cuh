// Transposed data of aligned groups, and their rows beside it: blocks that walk down strips of 128 columns.
//
// The lines are those of quantize/args/layout.h. A tile begins at a multiple of 32 bytes in them, so its codes are whole sectors of
// memory, and the zeros up to the next tile go with them: a tile stores what is between its begin in a line and the next one's,
// the first of all from 0 and the last to the end. So parts may end anywhere, and nothing is left over from tile to tile.
//
// What a walk is for are short groups: their rows come through the ring (quantize/cuda/fp8/ragged_transpose.cuh) while those before are coded,
// and a tile costs by its rows. A warp has the 16 rows of a slot, counted from the tile's first; one that has none only waits.
#pragma once

#include "quantize/cuda/fp8/ragged_transpose.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kAlignedWalkBlocks = 3;  // that a multiprocessor holds; with four, values lack registers
inline constexpr int kAlignedTiles = 4;       // row tiles that a part has at most

// A row tile of a part, and where it begins in a line. After the last of a part comes another, of which only that counts: it
// is where the part ends.
struct alignas(16) PartTile {
  int begin;
  int row;
  int rows;
  int group;
};

struct AlignedWalkShared {
  alignas(16) uint16_t ring[kRing][kTile];
  TransposedTile turned;
  alignas(16) float partial[kWarps][kTile];
  alignas(16) float scales[kTile];
  PartTile tiles[kAlignedTiles + 1];
};

// The same number, of which the compiler does not know it: what follows from it is computed again in each step of a loop, in place
// of keeping registers that values lack.
__device__ __forceinline__ int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Sends rows of a strip to the ring, where a row of the buffer has its place. What it needs it finds anew: registers that it
// would keep from tile to tile, values lack.
template <typename T>
__device__ __forceinline__ void send_rows(const QuantizeArgs& args, int col, int cols, int begin, int end,
                                          uint16_t (&ring)[kRing][kTile]) {
  constexpr int kPieces = kTile * sizeof(T) / 16, kRowsAtOnce = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
  if (piece * (16 / static_cast<int>(sizeof(T))) >= cols) return;
  const uint32_t pitch = static_cast<uint32_t>(args.layout.cols * sizeof(T));
  int row = begin + static_cast<int>(threadIdx.x / kPieces);
  const char* from = static_cast<const char*>(args.input) + static_cast<int64_t>(col) * sizeof(T) +
                     static_cast<int64_t>(row) * pitch + piece * 16;
  const uint32_t to = shared_address(ring) + piece * 16;
#pragma unroll
  for (int i = 0; i < kRing / kRowsAtOnce; ++i) {
    if (row < end) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       to + static_cast<uint32_t>(row) % kRing * static_cast<uint32_t>(sizeof(ring[0]))),
                   "l"(from)
                   : "memory");
    }
    row += kRowsAtOnce;
    from += pitch * static_cast<uint32_t>(kRowsAtOnce);
  }
}

// A slot's values from the ring, whose end they may lie across, and zeros past the `held`. Rows that are not may be on their
// way.
template <typename T>
__device__ __forceinline__ void load_slot(const uint16_t (&ring)[kRing][kTile], int first_row, int held,
                                          int lane, Values<T>& values) {
  const uint32_t first = static_cast<uint32_t>(first_row) % kRing;
  const auto load = [&](int r, uint32_t row) {
    const auto vector = reinterpret_cast<const Vector4<T>*>(ring[row])[lane];
    memcpy(values.at[r], &vector, sizeof(vector));
  };
  if (held == kRowsPerThread && first <= kRing - kRowsPerThread) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) load(r, first + r);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    values.at[r][0] = values.at[r][1] = zeros<T>();
    if (r < held) load(r, (first + r) % kRing);
  }
}

// The bytes from `begin` to `end` of a strip's lines, of which the chunks from `first` on are the `count` chunks of the tile
// and all others zero; all are multiples of 16. A few lanes take a line, as many as it has chunks.
__device__ __forceinline__ void store_piece_of_lines(const Layout& layout, uint8_t* data_t, int col,
                                                     int begin, int end, int first, int count,
                                                     TransposedTile& turned) {
  const int64_t stride = layout.line_length();
  uint8_t* lines = data_t + col * stride;
  const int cols = min(kTile, static_cast<int>(layout.cols) - col);
  const int chunks = (end - begin) / kChunk;
  const int shift = chunks <= 4 ? 2 : (chunks <= 8 ? 3 : 4);
  const int lanes = 1 << shift, step = kThreads >> shift;
  const int first_column = static_cast<int>(threadIdx.x) >> shift;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % lanes; i < chunks; i += lanes) {
    const int chunk = i - (first - begin) / kChunk;
    const bool coded = chunk >= 0 && chunk < count;
    uint8_t* target = lines + first_column * stride + begin + i * kChunk;
#pragma unroll 2
    for (int column = first_column; column < cols; column += step, target += step * stride) {
      uint4 codes = {};
      if (coded) codes = turned.chunk(column, chunk);
      *reinterpret_cast<uint4*>(target) = codes;
    }
  }
}

// Of a strip of columns the row tiles of one part; blocks are parts by strips.
template <DType element, typename T, ScaleMode mode>
__global__ void __launch_bounds__(kThreads, kAlignedWalkBlocks)
    walk_aligned_kernel(const __grid_constant__ QuantizeArgs args) {
  static_assert(sizeof(T) == 2 && (mode == ScaleMode::kRows || mode == ScaleMode::kTensor),
                "what rings are for");
  constexpr bool kOwn = mode == ScaleMode::kRows;  // scales of blocks
  extern __shared__ uint4 dynamic_shared[];
  AlignedWalkShared& shared = *reinterpret_cast<AlignedWalkShared*>(dynamic_shared);
  pdl_wait();
  if (args.is_noop()) return;
  if (!kOwn) store_tensor_scales(args);
  const Layout& layout = args.layout;
  const int warp = uniform(static_cast<int>(threadIdx.x / kWarpSize));
  const int lane = threadIdx.x % kWarpSize;
  const int strips = static_cast<int>(layout.col_tiles());
  const int strip = static_cast<int>(blockIdx.x) % strips, part = static_cast<int>(blockIdx.x) / strips;
  const int parts = static_cast<int>(gridDim.x) / strips;
  const int col = strip * kTile, cols = min(kTile, static_cast<int>(layout.cols) - col);
  const RowTile* table = layout.row_tile_table;
  const int used = uniform(table[0].used);
  const int64_t column_scales_width = round_up_4(layout.cols);
  if (kOwn) {  // the scales of row tiles that hold nothing
    for (int index = used + part; index < static_cast<int>(layout.row_tiles()); index += parts) {
      if (threadIdx.x < cols) args.scale_t[index * column_scales_width + col + threadIdx.x] = 0.0f;
    }
  }
  const int first = first_of_part(part, parts, used), count = first_of_part(part + 1, parts, used) - first;
  if (count == 0) return;
  if (threadIdx.x <= count) {
    const int index = first + static_cast<int>(threadIdx.x);
    PartTile tile = {static_cast<int>(layout.line_length()), 0, 0, 0};
    if (index < used) {
      const RowTile& listed = table[index];
      tile = {static_cast<int>(aligned_begin(listed.row, listed.group)), listed.row, listed.rows,
              listed.group};
    }
    shared.tiles[threadIdx.x] = tile;
  }
  __syncthreads();  // tiles are listed
  const int end_row = shared.tiles[count - 1].row + shared.tiles[count - 1].rows;
  if (shared.tiles[0].group != layout.groups) {
    const int row = shared.tiles[0].row;
    send_rows<T>(args, col, cols, row, min(row + kRing, end_row), shared.ring);
  }

  const int64_t row_scales_width = round_up_4(layout.rows);
  if (kOwn && args.rowwise && first == 0 && threadIdx.x < row_scales_width - layout.rows) {
    args.scale[strip * row_scales_width + layout.rows + threadIdx.x] = 0.0f;
  }
  const int own_column = static_cast<int>(threadIdx.x) - (kThreads - kTile);  // whose scale the thread finds
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();  // the rows are here
  for (int i = 0; i < count; ++i) {
    const PartTile& at = shared.tiles[i];
    const int col = anew(strip) * kTile, cols = min(kTile, static_cast<int>(layout.cols) - col);
    const bool has_columns = lane * kColsPerThread < cols;
    const bool tail = uniform(at.group) == layout.groups;
    const int slot_row = at.row + warp * kRowsPerThread;  // of the buffer
    const int held = uniform(min(at.rows - warp * kRowsPerThread, kRowsPerThread));
    Values<T> values;
    if (held > 0) {
      load_slot(shared.ring, slot_row, held, lane, values);
      if (tail || !has_columns) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) values.at[r][0] = values.at[r][1] = zeros<T>();
      }
      if (kOwn) {
        const float2 left = values.column_max(0), right = values.column_max(1);
        *reinterpret_cast<float4*>(&shared.partial[warp][lane * kColsPerThread]) =
            make_float4(left.x, left.y, right.x, right.y);
      }
    }
    __syncthreads();  // values are in registers, maxima of slots in shared memory, and stored codes have left it
    if (!tail) {
      send_rows<T>(args, col, cols, at.row + kRing, min(at.row + at.rows + kRing, end_row), shared.ring);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");

    float row_scale = 1.0f;  // of the row that this lane answers for
    if (kOwn) {
      if (own_column >= 0) {  // by the warps that the fewest tiles have rows for
        float largest = shared.partial[0][own_column];
#pragma unroll
        for (int s = 1; s < kWarps; ++s) {
          if (s * kRowsPerThread < at.rows) largest = fmaxf(largest, shared.partial[s][own_column]);
        }
        const float scale = encode_scale(largest, args.rule);
        shared.scales[own_column] = scale;
        if (own_column < cols)
          args.scale_t[(first + i) * column_scales_width + col + own_column] = tail ? 0.0f : 1.0f / scale;
      }
      if (args.rowwise && held > 0) {
        row_scale = slot_row_scale(values, lane, args.rule);
        const int own = RowMaxima<kRowsPerThread, T>::first_of(lane);
        if (lane < kRowsPerThread && own < held) {
          args.scale[anew(strip) * row_scales_width + slot_row + own] = tail ? 0.0f : 1.0f / row_scale;
        }
      }
      __syncthreads();  // scales of columns
    } else if (!tail) {
      row_scale = tensor_scale(args, at.group);
    }

    if (held > 0) {
      const int column = anew(strip) * kTile + lane * kColsPerThread;
      const uint32_t step = static_cast<uint32_t>(layout.cols);
      uint8_t* target = args.data + column + static_cast<int64_t>(slot_row) * step;
      float4 of_columns = make_float4(row_scale, row_scale, row_scale, row_scale);
      if (kOwn) of_columns = *reinterpret_cast<const float4*>(&shared.scales[lane * kColsPerThread]);
      const float scales[kColsPerThread] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
      const uint32_t written =
          args.rowwise && column < static_cast<int>(step) ? 0xffffu >> (kRowsPerThread - held) : 0;
      uint32_t words[kColsPerThread][kRowsPerThread / 4];
      encode_slot<element, kOwn>(values, row_scale, scales, written, target, step, words);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        shared.turned.chunk(lane * kColsPerThread + c, warp) =
            make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
      }
    }

    // The next tile's rows were on their way before the last that were sent for, if the ring has room for both tiles.
    if (at.rows + shared.tiles[i + 1].rows <= kRing) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();  // codes of lines, and the next tile's rows
    const int begin = first + i == 0 ? 0 : at.begin;
    store_piece_of_lines(layout, args.data_t, anew(strip) * kTile, begin, shared.tiles[i + 1].begin, at.begin,
                         (at.rows + kRowsPerThread - 1) / kRowsPerThread, shared.turned);
  }
}

}  // namespace transformer_plugin::quantize
