// Rows that stream through a warp: the form of the quantize kernels for sources that compute their values. What keeps
// them at the memory's rate is many warps and a short loop: few registers, code that stays in the instruction cache.
//
// A warp has the 16 rows of a tile that it has in tile_device.cuh too, and takes two a step: 16 lanes to a row, 8
// neighbouring columns to a lane. Rows are quantized in the step. Where columns are quantized too, values also go to
// shared memory, from where the same warp takes them in the form of `Values`.
//
// For values of 16 bits, rows of whole vectors and blocks along a row; the rest takes the kernels of fp8_tile.cuh and
// mx_tile.cuh.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kStreamCols = 8;  // of a lane
inline constexpr int kStreamLanes = kTile / kStreamCols;
inline constexpr int kStreamRows = kWarpSize / kStreamLanes;  // of a step
inline constexpr int kStreamSteps = kRowsPerThread / kStreamRows;
static_assert(kStreamSteps <= kStreamLanes, "a lane keeps the scale of one row");

// Neighbouring values of one row.
template <typename T>
struct Eight {
  Two<T> at[kStreamCols / 2];

  __device__ __forceinline__ float get(int c) const {
    const float2 two = to_floats(at[c / 2]);
    return c % 2 == 0 ? two.x : two.y;
  }
  __device__ __forceinline__ Two<T> largest() const {
    return larger_magnitudes(larger_magnitudes(at[0], at[1]), larger_magnitudes(at[2], at[3]));
  }
};

template <typename T>
__device__ __forceinline__ Eight<T> load_eight(const T* source, bool inside) {
  uint4 vector = {};
  if (inside) vector = __ldg(reinterpret_cast<const uint4*>(source));
  Eight<T> eight;
  memcpy(&eight, &vector, sizeof(vector));
  return eight;
}

// The largest magnitude over `kLanes` neighbouring lanes and `least`, in each of them; NaN is left out.
template <int kLanes, typename T>
__device__ __forceinline__ float amax_of_lanes(const Eight<T>& values, float least) {
  Two<T> largest = values.largest();
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    uint32_t word;
    memcpy(&word, &largest, sizeof(word));
    word = __shfl_xor_sync(0xffffffffu, word, distance);
    Two<T> other;
    memcpy(&other, &word, sizeof(word));
    largest = larger_magnitudes(largest, other);
  }
  const float2 two = to_floats(largest);
  return fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), least);
}

// Codes of 8 values.
template <DType element, typename T>
__device__ __forceinline__ uint2 encode8(const Eight<T>& values, float scale) {
  float scaled[kStreamCols];
#pragma unroll
  for (int c = 0; c < kStreamCols; ++c) scaled[c] = values.get(c) * scale;
  return {encode4<element>(scaled[0], scaled[1], scaled[2], scaled[3]).word,
          encode4<element>(scaled[4], scaled[5], scaled[6], scaled[7]).word};
}

// Where a lane stands: its columns, and the first of its rows.
struct StreamPlace {
  int warp_row;  // the warp's first row in the tile
  int lane;
  int64_t row;  // of the matrix
  int64_t col;
  int rows;   // of the matrix in the tile from `row` on, none where the columns are not the matrix's
  int loads;  // of the warp, the same where there are values

  __device__ __forceinline__ explicit StreamPlace(const Tile& tile)
      : warp_row(threadIdx.x / kWarpSize * kRowsPerThread), lane(threadIdx.x % kWarpSize) {
    const int first = warp_row + lane / kStreamLanes;
    const int column = lane % kStreamLanes * kStreamCols;
    row = tile.row + first;
    col = tile.col + column;
    rows = column < tile.cols ? tile.rows - first : 0;
    loads = tile.tail ? 0 : min(rows, kRowsPerThread - lane / kStreamLanes);
    keep(rows);
    keep(loads);
  }
};

// Row-wise codes of streamed rows; `Rows` finds and stores their scales. `r` is the first row of a step, of the warp's.
template <typename Rows>
struct RowWriter {
  Rows scales;
  uint8_t* target;
  int64_t stride;

  // `offset` columns to the right of the place.
  __device__ __forceinline__ RowWriter(const QuantizeArgs& args, const Tile& tile, const StreamPlace& place,
                                       int64_t offset)
      : scales(args, place.lane),
        target(args.data + (tile.member * args.layout.rows + place.row) * args.layout.cols + place.col +
               offset),
        stride(kStreamRows * args.layout.cols) {}

  template <typename T>
  __device__ __forceinline__ void add(const QuantizeArgs& args, const Eight<T>& values, int r,
                                      const StreamPlace& place) {
    const uint2 codes = scales.encode(args, values, r);
    if (r < place.rows) *reinterpret_cast<uint2*>(target) = codes;
    target += stride;
  }
};

// A tile of values on its way from rows to columns, then its codes, turned. A warp reads what it wrote itself, and
// accesses of both forms are to whole lines.
template <typename T>
union StreamTile {
  uint4 rows[kTile][kStreamLanes];
  uint2 parts[kTile][kWarpSize];
  TransposedTile turned;

  __device__ __forceinline__ void put(const Eight<T>& values, int r, const StreamPlace& place) {
    static_assert(sizeof(Eight<T>) == sizeof(uint4), "values of 16 bits");
    memcpy(&rows[place.warp_row + r + place.lane / kStreamLanes][place.lane % kStreamLanes], &values,
           sizeof(values));
  }
  __device__ __forceinline__ void take(Values<T>& values, const StreamPlace& place) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      memcpy(values.at[r], &parts[place.warp_row + r][place.lane], sizeof(uint2));
    }
  }
};

// Whether a matrix of 16-bit values goes this way. `sources` are what is read in vectors.
template <typename... Sources>
bool can_stream(const QuantizeArgs& args, Sources... sources) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(sources) % 16 == 0) && ...);
  const bool along_rows = args.layout.mode == ScaleMode::kRows || args.layout.mode == ScaleMode::kMx;
  return args.dtype != DType::kFloat32 && along_rows && !args.layout.square && args.layout.members == 1 &&
         !args.collected && !args.noop && args.layout.cols % kStreamCols == 0 && aligned &&
         reinterpret_cast<uintptr_t>(args.data) % kStreamCols == 0;
}

// What can_stream says, told to the compiler.
__device__ __forceinline__ QuantizeArgs streamed(QuantizeArgs args, ScaleMode mode) {
  args.layout.mode = mode;
  args.layout.square = false;
  args.layout.members = 1;
  args.collected = nullptr;
  args.noop = nullptr;
  return args;
}

}  // namespace transformer_plugin::quantize
