// The row-streaming form of the quantize kernels, for sources that compute their values. It is limited by
// memory bandwidth, for which it needs many resident warps and a short loop: few registers and code that fits
// the instruction cache.
//
// A warp processes the same 16 rows of a tile as in tile.cuh, two per step: 16 lanes per row, 8 neighbouring
// columns per lane. Rows are quantized within the step. With transposed data the values also go to shared
// memory, from which the same warp then reads them as a TileFragment.
//
// Only for 16-bit values, rows of whole vectors, and blocks along a row; other inputs use fp8/tile.cuh and
// mxfp8/tile.cuh.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kStreamCols = 8;  // per lane
inline constexpr int kStreamLanes = kTile / kStreamCols;
inline constexpr int kStreamRows = kWarpSize / kStreamLanes;  // per step
inline constexpr int kStreamSteps = kRowsPerThread / kStreamRows;
static_assert(kStreamSteps <= kStreamLanes, "a lane keeps the scale of one row");

// Eight neighbouring values of one row.
template <typename T>
struct Packed8 {
  Packed2<T> at[kStreamCols / 2];

  __device__ __forceinline__ float get(int c) const {
    const float2 two = to_floats(at[c / 2]);
    return c % 2 == 0 ? two.x : two.y;
  }
  __device__ __forceinline__ Packed2<T> largest() const {
    return larger_magnitudes(larger_magnitudes(at[0], at[1]), larger_magnitudes(at[2], at[3]));
  }
};

template <typename T>
__device__ __forceinline__ Packed8<T> load_eight(const T* source, bool inside) {
  uint4 vector = {};
  if (inside) vector = __ldg(reinterpret_cast<const uint4*>(source));
  Packed8<T> eight;
  memcpy(&eight, &vector, sizeof(vector));
  return eight;
}

// The maximum of magnitudes over `kLanes` neighbouring lanes, and of `least`, in each of them; NaN is
// ignored.
template <int kLanes, typename T>
__device__ __forceinline__ float amax_of_lanes(const Packed8<T>& values, float least) {
  Packed2<T> largest = values.largest();
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    uint32_t word;
    memcpy(&word, &largest, sizeof(word));
    word = __shfl_xor_sync(0xffffffffu, word, distance);
    Packed2<T> other;
    memcpy(&other, &word, sizeof(word));
    largest = larger_magnitudes(largest, other);
  }
  const float2 two = to_floats(largest);
  return fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), least);
}

// Quantizes 8 values.
template <DType element, typename T>
__device__ __forceinline__ uint2 encode8(const Packed8<T>& values, float scale) {
  float scaled[kStreamCols];
#pragma unroll
  for (int c = 0; c < kStreamCols; ++c) scaled[c] = values.get(c) * scale;
  return {encode4<element>(scaled[0], scaled[1], scaled[2], scaled[3]).word,
          encode4<element>(scaled[4], scaled[5], scaled[6], scaled[7]).word};
}

// The position of a lane: its columns, and the first of its rows.
struct StreamPosition {
  int warp_row;  // the warp's first row in the tile
  int lane;
  int64_t row;  // of the matrix
  int64_t col;
  int rows;   // rows of the tile from `row` on; 0 if the columns are outside of the matrix
  int loads;  // rows of the warp to load: 0 in the tail

  __device__ __forceinline__ explicit StreamPosition(const Tile& tile)
      : warp_row(threadIdx.x / kWarpSize * kRowsPerThread), lane(threadIdx.x % kWarpSize) {
    const int first = warp_row + lane / kStreamLanes;
    const int column = lane % kStreamLanes * kStreamCols;
    row = tile.row + first;
    col = tile.col + column;
    rows = column < tile.cols ? tile.rows - first : 0;
    loads = tile.tail ? 0 : min(rows, kRowsPerThread - lane / kStreamLanes);
    keep_in_register(rows);
    keep_in_register(loads);
  }
};

// Stores row-wise data of streamed rows; `Rows` computes and stores their scales. `r` is the first row of a
// step, counted from the warp's first.
template <typename Rows>
struct RowWriter {
  Rows scales;
  uint8_t* target;
  int64_t stride;

  // `offset` columns to the right of the position.
  __device__ __forceinline__ RowWriter(const QuantizeArgs& args, const Tile& tile, const StreamPosition& pos,
                                       int64_t offset)
      : scales(args, pos.lane),
        target(args.data + (tile.matrix * args.layout.rows + pos.row) * args.layout.cols + pos.col + offset),
        stride(kStreamRows * args.layout.cols) {}

  template <typename T>
  __device__ __forceinline__ void add(const QuantizeArgs& args, const Packed8<T>& values, int r,
                                      const StreamPosition& pos) {
    const uint2 bytes = scales.encode(args, values, r);
    if (r < pos.rows) *reinterpret_cast<uint2*>(target) = bytes;
    target += stride;
  }
};

// A tile of values that is written by rows and read by columns, and then holds the transposed quantized tile.
// A warp reads only what it wrote, and accesses of both forms cover whole rows.
template <typename T>
union StreamTile {
  uint4 rows[kTile][kStreamLanes];
  uint2 parts[kTile][kWarpSize];
  TransposedTile transposed_tile;

  __device__ __forceinline__ void put(const Packed8<T>& values, int r, const StreamPosition& pos) {
    static_assert(sizeof(Packed8<T>) == sizeof(uint4), "values of 16 bits");
    memcpy(&rows[pos.warp_row + r + pos.lane / kStreamLanes][pos.lane % kStreamLanes], &values,
           sizeof(values));
  }
  __device__ __forceinline__ void take(TileFragment<T>& values, const StreamPosition& pos) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      memcpy(values.at[r], &parts[pos.warp_row + r][pos.lane], sizeof(uint2));
    }
  }
};

// Whether the row-streaming form supports the arguments. `sources` are the pointers that are read in vectors.
template <typename... Sources>
bool can_stream(const QuantizeArgs& args, Sources... sources) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(sources) % 16 == 0) && ...);
  const bool along_rows = args.layout.granularity == ScaleGranularity::k1x128 ||
                          args.layout.granularity == ScaleGranularity::k1x32;
  return args.dtype != DType::kFloat32 && along_rows && !args.layout.square && args.layout.matrices == 1 &&
         !args.amax_out && !args.noop && args.layout.cols % kStreamCols == 0 && aligned &&
         reinterpret_cast<uintptr_t>(args.data) % kStreamCols == 0;
}

// Sets what can_stream guarantees as constants, for the compiler.
__device__ __forceinline__ QuantizeArgs assume_streamable(QuantizeArgs args, ScaleGranularity granularity) {
  args.layout.granularity = granularity;
  args.layout.square = false;
  args.layout.matrices = 1;
  args.amax_out = nullptr;
  args.noop = nullptr;
  return args;
}

}  // namespace transformer_plugin::quantize
