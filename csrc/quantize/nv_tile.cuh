// A tile in NVFP4. A thread works on 16 values that share a scale: of a column the 16 rows that it holds, of a row 16
// values that its warp hands around through shared memory. The tail of a ragged matrix needs no case of its own: its
// values are loaded as zero, whose codes and scales are 0.
#pragma once

#include "quantize/quantize_device.cuh"
#include "quantize/quantize_nv.h"

namespace transformer_plugin::quantize {

static_assert(kRowsPerThread == kNvBlock, "a thread holds whole blocks of transposed data");

enum class NvCoding { kNearest, kStochastic, kFourOverSix };

// Eight codes in each word.
struct NvBlock {
  uint2 codes;
  uint8_t scale;
};

template <typename T>
struct NvShared {
  static constexpr int kPassRows = sizeof(T) == 2 ? 16 : 8;  // of a warp, handed around at once
  static constexpr int kPitch = kTile + 16 / sizeof(T);      // so that four rows lie in different banks
  alignas(16) T rows[kWarps][kPassRows][kPitch];
  uint2 turned[kTile * kNvBlocks];  // codes of transposed data: line c is column c
  alignas(8) uint8_t scales[kTile][kNvBlocks];
  alignas(8) uint8_t scales_t[kTile][kNvBlocks];

  // A warp writes one block of 32 columns at a time, and reads whole lines.
  __device__ __forceinline__ uint2& turned_at(int column, int block) {
    return turned[column * kNvBlocks + (block ^ ((column / kColsPerThread) & (kNvBlocks - 1)))];
  }
};

template <typename Round>
__device__ __forceinline__ uint2 pack(const float (&x)[kNvBlock], float factor, Round&& round) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) words[i / 8] |= round(x[i] * factor, i) << (4 * (i % 8));
  return {words[0], words[1]};
}

__device__ __forceinline__ uint2 pack_nearest(const float (&x)[kNvBlock], float factor) {
  return pack(x, factor, [](float value, int) { return e2m1_nearest(value); });
}

__device__ __forceinline__ uint2 pack_stochastic(const float (&x)[kNvBlock], float factor,
                                                 const Philox4& random) {
  return pack(x, factor,
              [&](float value, int i) { return e2m1_stochastic(value, random.word[i / 4], i % 4); });
}

__device__ __forceinline__ float error_of(const float (&x)[kNvBlock], uint2 codes, float decode,
                                          bool squared) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) {
    const uint32_t code = (i < 8 ? codes.x : codes.y) >> (4 * (i % 8));
    error += nv_error(x[i], code, decode, squared);
  }
  return error;
}

__device__ __forceinline__ NvBlock encode_four_over_six(const float (&x)[kNvBlock], float target,
                                                        const NvGlobal& global, bool squared) {
  const NvScale six = nv_scale(fminf(target, 448.0f), global);
  const NvScale four = nv_scale(fminf(target * 1.5f, 448.0f), global);
  const uint2 codes6 = pack_nearest(x, six.encode), codes4 = pack_nearest(x, four.encode);
  const bool better = error_of(x, codes4, four.decode, squared) < error_of(x, codes6, six.decode, squared);
  return better ? NvBlock{codes4, four.code} : NvBlock{codes6, six.code};
}

// `number` is the block's, for its random bits.
template <NvCoding coding>
__device__ __forceinline__ NvBlock encode_block(const NvArgs& args, const float (&x)[kNvBlock], float amax,
                                                const NvGlobal& global, int64_t number, uint32_t direction) {
  const float target = amax * global.sixth;
  if constexpr (coding == NvCoding::kFourOverSix) {
    return encode_four_over_six(x, target, global, args.method == NvMethod::kFourOverSixMse);
  }
  const NvScale scale = nv_scale(target, global);
  if constexpr (coding == NvCoding::kStochastic) {
    const Philox4 random = nv_random(static_cast<uint64_t>(*args.seed), number, direction);
    return {pack_stochastic(x, scale.encode, random), scale.code};
  }
  return {pack_nearest(x, scale.encode), scale.code};
}

// 16 neighbours of a row from shared memory, and their largest magnitude.
template <typename T>
__device__ __forceinline__ float read_block(const T* source, float (&x)[kNvBlock]) {
  Two<T> pairs[kNvBlock / 2];
#pragma unroll
  for (int i = 0; i < static_cast<int>(kNvBlock * sizeof(T) / 16); ++i) {
    const uint4 vector = reinterpret_cast<const uint4*>(source)[i];
    memcpy(reinterpret_cast<char*>(pairs) + 16 * i, &vector, 16);
  }
  Two<T> largest = zeros<T>();
#pragma unroll
  for (int i = 0; i < kNvBlock / 2; ++i) {
    largest = max_abs(largest, pairs[i]);
    x[2 * i] = to_float(pairs[i].x);
    x[2 * i + 1] = to_float(pairs[i].y);
  }
  return fmaxf(to_float(largest.x), to_float(largest.y));
}

// The largest magnitude of the 16x16 block that the thread's columns lie in.
template <typename T>
__device__ __forceinline__ float square_amax(const Values<T>& values) {
  const float2 a = values.column_max(0), b = values.column_max(1);
  float largest = fmaxf(fmaxf(a.x, a.y), fmaxf(b.x, b.y));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

// Codes of the rows, to memory, and their scales. A lane has block lane % 8 of every fourth row.
template <NvCoding coding, typename T>
__device__ __forceinline__ void encode_rows(const NvArgs& args, const Tile& tile, const Values<T>& values,
                                            int warp, int lane, float square, NvShared<T>& shared) {
  using Shared = NvShared<T>;
  const Layout& layout = args.layout;
  const int block = lane % kNvBlocks;
  const float of_square = __shfl_sync(0xffffffffu, square, block * (kNvBlock / kColsPerThread));
  const float bound = nv_bound(args.method);
  NvGlobal global = nv_global(args.row_scaled || tile.tail ? 0.0f : args.amax[tile.group], bound);
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
    for (int r = lane / kNvBlocks; r < Shared::kPassRows; r += kWarpSize / kNvBlocks) {
      const int row = warp * kRowsPerThread + pass + r;
      const int64_t line = tile.member * layout.rows + tile.row + row;
      const int64_t first = line * layout.cols + tile.col + block * kNvBlock;
      if (args.row_scaled) global = nv_global(!tile.tail && row < tile.rows ? args.amax[line] : 0.0f, bound);
      float x[kNvBlock];
      const float own = read_block<T>(&shared.rows[warp][r][block * kNvBlock], x);
      const NvBlock coded =
          encode_block<coding>(args, x, layout.square ? of_square : own, global, first / kNvBlock, 0);
      shared.scales[row][block] = coded.scale;
      if (row < tile.rows && block * kNvBlock < tile.cols) {
        *reinterpret_cast<uint2*>(args.data + first / 2) = coded.codes;
      }
    }
  }
}

// The random Hadamard transform, rounded to T; and the largest magnitude of what comes out.
template <typename T>
__device__ __forceinline__ float transform(float (&x)[kNvBlock]) {
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) x[i] = nv_is_negated(i) ? -x[i] : x[i];
#pragma unroll
  for (int stride = 1; stride < kNvBlock; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  Two<T> largest = zeros<T>();
#pragma unroll
  for (int i = 0; i < kNvBlock; i += 2) {
    const Two<T> rounded = two_from_floats<T>(x[i] * 0.25f, x[i + 1] * 0.25f);
    largest = max_abs(largest, rounded);
    x[i] = to_float(rounded.x);
    x[i + 1] = to_float(rounded.y);
  }
  return fmaxf(to_float(largest.x), to_float(largest.y));
}

// Whether a warp's rows are one block of transposed data: they may be less at the end of the matrix or of a group, and
// are none where a group does not begin with a block (quantize_nv.h).
__device__ __forceinline__ bool is_block(const Tile& tile, int warp) {
  return tile.row % kNvBlock == 0 && (warp + 1) * kNvBlock <= tile.rows;
}

// Codes of the columns, turned, and their scales, in shared memory.
template <NvCoding coding, bool hadamard, typename T>
__device__ __forceinline__ void encode_columns(const NvArgs& args, const Tile& tile, const Values<T>& values,
                                               int warp, int lane, float square, NvShared<T>& shared) {
  const Layout& layout = args.layout;
  const float bound = nv_bound(args.method);
  NvGlobal global = nv_global(args.row_scaled || tile.tail ? 0.0f : args.amax_t[tile.group], bound);
  const bool whole = is_block(tile, warp);
  const uint8_t broken = !tile.tail && warp * kNvBlock < tile.rows ? 0x7f : 0;
  float own[kColsPerThread];
#pragma unroll
  for (int i = 0; i < kColsPerThread / 2; ++i) {
    const float2 largest = values.column_max(i);
    own[2 * i] = layout.square ? square : largest.x;
    own[2 * i + 1] = layout.square ? square : largest.y;
  }
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    const int column = lane * kColsPerThread + c;
    const int64_t line = tile.member * layout.cols + tile.col + column;
    NvBlock coded = {{0, 0}, broken};
    if (whole) {
      if (args.row_scaled) {
        const bool exists = !tile.tail && column < tile.cols;
        global = nv_global(exists ? args.amax_t[tile.group * layout.cols + tile.col + column] : 0.0f, bound);
      }
      float x[kNvBlock];
#pragma unroll
      for (int r = 0; r < kNvBlock; ++r) x[r] = values.get(r, c);
      if constexpr (hadamard) own[c] = transform<T>(x);
      const int64_t first = line * layout.rows + tile.row + warp * kNvBlock;
      coded = encode_block<coding>(args, x, own[c], global, first / kNvBlock, 1);
    }
    shared.turned_at(column, warp) = coded.codes;
    shared.scales_t[column][warp] = coded.scale;
  }
}

// Transposed codes, 64 bytes of a line by 8 lanes. A tile that does not begin with a block writes those 16 rows of the
// buffer that begin in it.
template <typename T>
__device__ __forceinline__ void store_columns(const NvArgs& args, const Tile& tile, NvShared<T>& shared) {
  const Layout& layout = args.layout;
  const int past = static_cast<int>(tile.row % kNvBlock);
  const int skipped = past == 0 ? 0 : kNvBlock - past;
  const int64_t first = tile.row + skipped;
  for (int i = threadIdx.x; i < tile.cols * kNvBlocks; i += kThreads) {
    const int column = i / kNvBlocks, block = i % kNvBlocks;
    if (skipped + block * kNvBlock >= tile.rows) continue;
    const int64_t line = tile.member * layout.cols + tile.col + column;
    const uint2 codes = past == 0 ? shared.turned_at(column, block) : uint2{0, 0};
    *reinterpret_cast<uint2*>(args.data_t + (line * layout.rows + first + block * kNvBlock) / 2) = codes;
  }
}

__device__ __forceinline__ void store_scales(const Layout& layout, const Tile& tile, bool transposed,
                                             const uint8_t (*scales)[kNvBlocks], uint8_t* target) {
  const int lines = transposed ? tile.cols : tile.rows, words = words_within(layout, tile, transposed);
  for (int i = threadIdx.x; i < lines * 2; i += kThreads) {
    const int line = i / 2, word = i % 2;
    if (word >= words) continue;
    *reinterpret_cast<uint32_t*>(target + word_index(layout, tile, transposed, line, word)) =
        *reinterpret_cast<const uint32_t*>(&scales[line][4 * word]);
  }
}

// Of a tile past the last group: transposed scales have a place for it.
__device__ __forceinline__ void zero_scales(const NvArgs& args, const Tile& tile) {
  for (int i = threadIdx.x; i < tile.cols * 2; i += kThreads) {
    *reinterpret_cast<uint32_t*>(args.scale_t + word_index(args.layout, tile, true, i / 2, i % 2)) = 0;
  }
}

// A tile, by all threads of a block.
template <NvCoding coding, bool hadamard, typename T>
__device__ __forceinline__ void quantize_nv_tile(const NvArgs& args, const Tile& tile, NvShared<T>& shared) {
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (args.rowwise) zero_word_padding(layout, tile, false, args.scale, threadIdx.x, kThreads);
  if (args.transposed) zero_word_padding(layout, tile, true, args.scale_t, threadIdx.x, kThreads);
  if (tile.rows == 0) {
    if (args.transposed) zero_scales(args, tile);
    return;
  }
  Values<T> values;
  PlainSource<T>{}.load(args, tile, warp, lane, values);
  const float square = layout.square ? square_amax(values) : 0.0f;
  if (args.rowwise) encode_rows<coding>(args, tile, values, warp, lane, square, shared);
  if (args.transposed) encode_columns<coding, hadamard>(args, tile, values, warp, lane, square, shared);
  __syncthreads();
  if (args.rowwise) store_scales(layout, tile, false, shared.scales, args.scale);
  if (args.transposed) {
    store_scales(layout, tile, true, shared.scales_t, args.scale_t);
    store_columns(args, tile, shared);
  }
}

template <typename T, NvCoding coding, bool hadamard>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    quantize_nv_kernel(const __grid_constant__ NvArgs args) {
  __shared__ NvShared<T> shared;
  if (!args.is_noop()) quantize_nv_tile<coding, hadamard>(args, block_tile(args.layout), shared);
}

template <typename T>
void launch_quantize_nv_of(const NvArgs& args, void* stream) {
  const unsigned grid = tile_grid(args.layout);
  if (grid == 0) return;
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  };
  const bool hadamard = args.hadamard && args.transposed;
  if (is_four_over_six(args.method)) {
    launch(quantize_nv_kernel<T, NvCoding::kFourOverSix, false>);
  } else if (args.method == NvMethod::kStochastic) {
    hadamard ? launch(quantize_nv_kernel<T, NvCoding::kStochastic, true>)
             : launch(quantize_nv_kernel<T, NvCoding::kStochastic, false>);
  } else {
    hadamard ? launch(quantize_nv_kernel<T, NvCoding::kNearest, true>)
             : launch(quantize_nv_kernel<T, NvCoding::kNearest, false>);
  }
  check_launch("quantize_nv_kernel");
}

}  // namespace transformer_plugin::quantize
