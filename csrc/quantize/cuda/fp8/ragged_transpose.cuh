// Transposed data of ragged groups that begin anywhere, and their rows beside it: blocks that walk down strips of 128 columns.
//
// A line of transposed data belongs to one column and holds its rows one after the other, those of all groups. Where groups
// begin inside of 32 bytes of it, tiles that are stored one by one leave parts of a sector to two blocks, each a transaction
// of its own. Here a block takes one row tile after the other, collects the codes of 128 rows that share a cache line, and
// stores them whole. Rows come through a ring in shared memory, sent for up to 128 ahead, so that short groups do not wait for
// memory one by one.
//
// A warp has the 16 rows of a slot that begins at a multiple of 16 of the buffer, so that its codes are whole words of a line
// wherever the tile begins: 128 rows lie in up to 9 slots.
#pragma once

#include <cstdint>

#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kSlots = kTile / kRowsPerThread + 1;
inline constexpr int kWalkThreads = kSlots * kWarpSize;
inline constexpr int kWalkBlocks = 3;  // that a multiprocessor holds
inline constexpr int kRing = kTile;    // rows that are sent for ahead
inline constexpr int kChunk = 16;      // bytes of a line that are stored at once, and rows of a slot
inline constexpr int kLine = 128;      // bytes that a cache holds together
inline constexpr int kLineChunks =
    2 * kLine / kChunk;                              // of a column: a line that is not whole yet, and a tile
inline constexpr int kLineStride = kLineChunks + 1;  // odd: neighbouring lanes store without conflicts

// To a multiple of a power of two.
__device__ __forceinline__ int round_down(int value, int multiple) { return value & -multiple; }

struct WalkShared {
  alignas(16) uint16_t ring[kRing][kTile];
  uint4 chunks[kTile * kLineStride];
  alignas(16) float partial[kSlots][kTile];
  alignas(16) float scales[kTile];

  // That of a row of the buffer.
  __device__ __forceinline__ uint4& chunk(int column, int row) {
    return chunks[(column % kColsPerThread * kWarpSize + column / kColsPerThread) * kLineStride +
                  static_cast<uint32_t>(row) / kChunk % kLineChunks];
  }
};

// The bytes of a chunk from `from` to `to`, in as few stores as their places allow. Other blocks have the rest.
__device__ __forceinline__ void store_part_of_chunk(uint8_t* target, const uint4& chunk, int from, int to) {
  const uint8_t* source = reinterpret_cast<const uint8_t*>(&chunk);
  const auto store = [&](auto word, bool wanted) {
    constexpr int kSize = sizeof(word);
    if (!wanted || to - from < kSize) return;
    store_kept(target + from, *reinterpret_cast<const decltype(word)*>(source + from));
    from += kSize;
  };
  store(uint8_t{}, from % 2 != 0);  // up to a multiple of 8, and on in ever smaller pieces
  store(uint16_t{}, from % 4 != 0);
  store(uint32_t{}, from % 8 != 0);
  store(uint2{}, true);
  store(uint32_t{}, true);
  store(uint16_t{}, true);
  store(uint8_t{}, true);
}

// The first of `tiles` row tiles that a part of `parts` has.
__device__ __forceinline__ int first_of_part(int part, int parts, int tiles) {
  return tiles / parts * part + min(part, tiles % parts);
}

// What all threads have alike, so that the compiler sees it too: that a warp does not part, that one register does for it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ RowTile uniform(const RowTile& tile) {
  return {uniform(tile.group), uniform(tile.row), static_cast<int16_t>(uniform(tile.rows)),
          tile.even,           tile.last,         tile.used};
}

// The scale of the row of a slot that the lane answers for: the row Maxima::first_of(lane).
template <typename T>
__device__ __forceinline__ float slot_row_scale(const Values<T>& values, int lane, const ScaleRule& rule) {
  RowMaxima<kRowsPerThread, T> maxima;
  maxima.find(values, lane);
  const float own_half = maxima.amax(0);
  const float other_half = __shfl_xor_sync(0xffffffffu, own_half, kRowsPerThread);
  return encode_scale(fmaxf(own_half, other_half), rule);
}

// Codes of a slot's values: row-wise ones go to the rows that are `written`, those of a lane's columns come back, a word for 4
// rows. `row_scale` is one for all rows, or where scales are their `own` that of the row that the lane answers for.
template <DType element, bool own, typename T>
__device__ __forceinline__ void encode_slot(const Values<T>& values, float row_scale,
                                            const float (&scales)[kColsPerThread], uint32_t written,
                                            uint8_t* target, uint32_t step,
                                            uint32_t (&words)[kColsPerThread][kRowsPerThread / 4]) {
#pragma unroll
  for (int word = 0; word < kRowsPerThread / 4; ++word) {
    float scaled[4][kColsPerThread];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * word + i;
      const float of_row =
          own ? __shfl_sync(0xffffffffu, row_scale, RowMaxima<kRowsPerThread, T>::lane_of(r)) : row_scale;
      float value[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        value[c] = values.get(r, c);
        scaled[i][c] = value[c] * scales[c];
      }
      const Codes4 codes =
          encode4<element>(value[0] * of_row, value[1] * of_row, value[2] * of_row, value[3] * of_row);
      if (written & (1u << r)) *reinterpret_cast<uint32_t*>(step_to(target, step, r)) = codes.word;
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      words[c][word] = encode4<element>(scaled[0][c], scaled[1][c], scaled[2][c], scaled[3][c]).word;
    }
  }
}

// Rows of a group on average from which on tiles stored one by one are faster into aligned lines: short groups leave such tiles
// mostly empty, and a walk only its steps.
inline constexpr int64_t kAlignedWalkRows = 1024;

// Whether a walk takes a matrix: the kernel below, or where lines are aligned that of quantize/cuda/fp8/aligned_transpose.cuh. Rows alone do not
// depend on where groups begin.
inline bool walks_columns(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  // Places in aligned lines are counted in 32 bits.
  const bool lines_fit = layout.aligned ? layout.rows > 0 && layout.rows < kAlignedWalkRows * layout.groups &&
                                              layout.line_length() <= INT32_MAX - kTile
                                        : layout.rows % kChunk == 0;
  return layout.grouped() && lines_fit && args.transposed && !args.collected &&
         args.dtype != DType::kFloat32 &&
         (layout.mode == ScaleMode::kRows || layout.mode == ScaleMode::kTensor) && layout.cols % 8 == 0 &&
         layout.cols <= int64_t{1} << 24 && aligned(args.input, 16) && aligned(args.data, 4) &&
         aligned(args.data_t, kChunk);
}

// Of a strip of columns the row tiles of one part; blocks are parts by strips. Where lines of groups have sectors of their own,
// parts may end anywhere: all blocks have one, and short ones, side by side in memory, are the faster. Elsewhere each end costs
// stores of a few bytes: there are only `few` parts, and the other blocks have none.
template <DType element, typename T, ScaleMode mode>
__global__ void __launch_bounds__(kWalkThreads, kWalkBlocks)
    walk_columns_kernel(const __grid_constant__ QuantizeArgs args, int few) {
  static_assert(sizeof(T) == 2 && (mode == ScaleMode::kRows || mode == ScaleMode::kTensor),
                "what rings are for");
  constexpr bool kOwn = mode == ScaleMode::kRows;  // scales of blocks
  extern __shared__ uint4 dynamic_shared[];
  WalkShared& shared = *reinterpret_cast<WalkShared*>(dynamic_shared);
  pdl_wait();
  if (args.is_noop()) return;
  if (!kOwn) store_tensor_scales(args);
  const Layout& layout = args.layout;
  const int slot = uniform(static_cast<int>(threadIdx.x / kWarpSize));
  const int lane = threadIdx.x % kWarpSize;
  const int strips = static_cast<int>(layout.col_tiles());
  const int strip = static_cast<int>(blockIdx.x) % strips, part = static_cast<int>(blockIdx.x) / strips;
  const int col = strip * kTile, cols = min(kTile, static_cast<int>(layout.cols) - col);
  const RowTile* table = layout.row_tile_table;
  const int used = uniform(table[0].used);
  const bool even = uniform(table[0].even) && layout.rows % kEvenRows == 0;
  const int blocks = static_cast<int>(gridDim.x) / strips, parts = even ? blocks : few;
  const int64_t column_scales_width = round_up_4(layout.cols);
  if (kOwn) {  // the scales of row tiles that hold nothing
    for (int index = used + part; index < static_cast<int>(layout.row_tiles()); index += blocks) {
      if (threadIdx.x < cols) args.scale_t[index * column_scales_width + col + threadIdx.x] = 0.0f;
    }
  }
  if (part >= parts) return;
  const int first = first_of_part(part, parts, used), last = first_of_part(part + 1, parts, used);
  if (first >= last) return;
  const RowTile end_tile = uniform(table[last - 1]);
  const int begin_row = uniform(table[first].row), end_row = end_tile.row + end_tile.rows;

  constexpr int kPieces = kTile * sizeof(T) / 16;  // of a row
  constexpr int kRowsAtOnce = kWalkThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
  const uint32_t pitch = static_cast<uint32_t>(layout.cols * sizeof(T));
  const int send_end = piece * (16 / static_cast<int>(sizeof(T))) < cols ? end_row : 0;
  int send_row = begin_row + static_cast<int>(threadIdx.x / kPieces);
  const char* send_from = static_cast<const char*>(args.input) + static_cast<int64_t>(col) * sizeof(T) +
                          static_cast<int64_t>(send_row) * pitch + piece * 16;
  const uint32_t ring = shared_address(shared.ring) + piece * 16;
  const auto send = [&](int end) {
    end = min(end, send_end);
#pragma unroll 4
    while (send_row < end) {
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
              ring + static_cast<uint32_t>(send_row) % kRing * static_cast<uint32_t>(sizeof(shared.ring[0]))),
          "l"(send_from)
          : "memory");
      send_row += kRowsAtOnce;
      send_from += pitch * static_cast<uint32_t>(kRowsAtOnce);
    }
  };
  send(begin_row + kRing);

  const bool has_columns = lane * kColsPerThread < cols;
  uint8_t* lines = args.data_t + static_cast<int64_t>(col) * layout.rows;
  uint8_t* rows = args.data + col + lane * kColsPerThread;
  float* row_scales = args.scale + static_cast<int64_t>(strip) * round_up_4(layout.rows);
  float* column_scales = args.scale_t + first * column_scales_width + col + threadIdx.x;
  RowTile next = table[first];
  int stored_row = begin_row;  // up to here lines are stored
  for (int index = first; index < last; ++index) {
    const RowTile at = uniform(next);
    if (index + 1 < last) next = table[index + 1];
    const bool tail = at.group == layout.groups;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // the rows are here, and what was stored has left shared memory

    const int slot_row = round_down(at.row, kChunk) + slot * kChunk;  // of the buffer
    const int low = max(0, at.row - slot_row), high = min(kChunk, at.row + at.rows - slot_row);
    // Those of the slot's rows that are of the tile, a bit for each.
    const uint32_t held = high > low ? (0xffffu >> (kRowsPerThread - high)) & (0xffffu << low) : 0;
    Values<T> values;
    const char* source = reinterpret_cast<const char*>(shared.ring[static_cast<uint32_t>(slot_row) % kRing]) +
                         lane * sizeof(Vector4<T>);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const auto vector = *reinterpret_cast<const Vector4<T>*>(source + r * sizeof(shared.ring[0]));
      memcpy(values.at[r], &vector, sizeof(vector));
    }
    if (held != 0xffffu || tail || cols != kTile) {
      const uint32_t filled = tail || !has_columns ? 0 : held;
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        if (!(filled & (1u << r))) values.at[r][0] = values.at[r][1] = zeros<T>();
      }
    }
    if (kOwn) {
      const float2 left = values.column_max(0), right = values.column_max(1);
      *reinterpret_cast<float4*>(&shared.partial[slot][lane * kColsPerThread]) =
          make_float4(left.x, left.y, right.x, right.y);
    }
    __syncthreads();  // values are in registers, maxima of slots in shared memory
    send(at.row + at.rows + kRing);

    float row_scale = 1.0f;  // of the row that this lane answers for
    using Maxima = RowMaxima<kRowsPerThread, T>;
    if (kOwn) {
      if (threadIdx.x < kTile) {
        float largest = shared.partial[0][threadIdx.x];
#pragma unroll
        for (int s = 1; s < kSlots; ++s) largest = fmaxf(largest, shared.partial[s][threadIdx.x]);
        const float scale = encode_scale(largest, args.rule);
        shared.scales[threadIdx.x] = scale;
        if (threadIdx.x < cols) *column_scales = tail ? 0.0f : 1.0f / scale;
        column_scales += column_scales_width;
      }
      if (args.rowwise && held != 0) {
        row_scale = slot_row_scale(values, lane, args.rule);
        const int own = Maxima::first_of(lane);
        if (lane < kRowsPerThread && (held >> own & 1))
          row_scales[slot_row + own] = tail ? 0.0f : 1.0f / row_scale;
      }
      __syncthreads();  // scales of columns
    } else if (!tail) {
      row_scale = tensor_scale(args, at.group);
    }

    if (held != 0) {
      float4 of_columns = make_float4(row_scale, row_scale, row_scale, row_scale);
      if (kOwn) of_columns = *reinterpret_cast<const float4*>(&shared.scales[lane * kColsPerThread]);
      const float scales[kColsPerThread] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
      const uint32_t written = args.rowwise && has_columns ? held : 0;
      const uint32_t step = static_cast<uint32_t>(layout.cols);
      uint32_t words[kColsPerThread][kRowsPerThread / 4];
      encode_slot<element, kOwn>(values, row_scale, scales, written,
                                 rows + static_cast<int64_t>(slot_row) * step, step, words);
      if (slot == 0 && low != 0 && index != first) {  // the tile before ended in this chunk
#pragma unroll
        for (int c = 0; c < kColsPerThread; ++c) {
          const uint4 before = shared.chunk(lane * kColsPerThread + c, slot_row);
          words[c][0] |= before.x;
          words[c][1] |= before.y;
          words[c][2] |= before.z;
          words[c][3] |= before.w;
        }
      }
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        shared.chunk(lane * kColsPerThread + c, slot_row) =
            make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
      }
    }

    const bool at_end = index + 1 == last;
    const int stop = at.row + at.rows, ready = at_end ? stop : round_down(stop, kLine);
    if (ready <= stored_row) continue;
    __syncthreads();  // codes of lines
    for (int base = round_down(stored_row, kLine); base < ready; base += kLine) {
      const int row = base + lane % 8 * kChunk, first_column = slot * 4 + lane / 8;
      const bool whole = row >= begin_row && row + kChunk <= ready;
      uint8_t* target = lines + first_column * layout.rows + row;
      for (int column = first_column; column < cols;
           column += kSlots * 4, target += kSlots * 4 * layout.rows) {
        if (whole) *reinterpret_cast<uint4*>(target) = shared.chunk(column, row);
      }
    }
    // Chunks that the parts before and after have the rest of.
    if (threadIdx.x < cols) {
      const int column = threadIdx.x;
      bool wanted = stored_row == begin_row && begin_row % kChunk != 0;
      int chunk_row = round_down(begin_row, kChunk);
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        if (wanted) {
          store_part_of_chunk(lines + column * layout.rows + chunk_row, shared.chunk(column, chunk_row),
                              max(begin_row - chunk_row, 0), min(ready - chunk_row, kChunk));
        }
        const int last_row = round_down(stop, kChunk);
        wanted = at_end && stop != last_row && !(wanted && last_row == chunk_row);
        chunk_row = last_row;
      }
    }
    stored_row = ready;
  }
}

}  // namespace transformer_plugin::quantize
