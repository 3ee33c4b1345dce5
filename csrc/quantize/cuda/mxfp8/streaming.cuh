// Row-streaming kernels (tile/streaming_rows.cuh) for MXFP8, 1x32 blocks.
#pragma once

#include "quantize/cuda/mxfp8/tile.cuh"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {

template <DType element>
struct MxStreamRows {
  static constexpr int kLanes = kMxBlock / kStreamCols;  // per block
  static constexpr int kWords = kStreamSteps / kLanes;   // steps whose exponents a lane keeps
  static_assert(kLanes == kMxBlocksPerRow && kWords == 2, "a lane stores a word of four blocks at most");
  int own;            // the lane's number in its block
  uint32_t kept = 0;  // exponents of the lane's block, the latest in the lowest byte

  __device__ __forceinline__ MxStreamRows(const QuantizeArgs&, int lane) : own(lane % kLanes) {
    keep_in_register(own);
  }

  template <typename T>
  __device__ __forceinline__ uint2 encode(const QuantizeArgs& args, const Packed8<T>& values, int r) {
    const uint32_t bits = quick_e8m0_bits<element>(amax_of_lanes<kLanes>(values, 0.0f));
    if (own == r / kStreamRows % kLanes) kept = kept << 8 | bits >> 23;
    return encode8<element>(values, quick_e8m0_multiplier(bits));
  }
  // Combines the exponents of a row's four blocks into one word, which one lane stores.
  __device__ __forceinline__ void finish(const QuantizeArgs& args, const Tile& tile,
                                         const StreamPosition& pos) const {
    const int block = pos.lane / kLanes % kMxBlocksPerRow;
    uint32_t stored = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = (kept >> (8 * (kWords - 1 - i)) & 0xffu) << (8 * block);
      word |= __shfl_xor_sync(0xffffffffu, word, kLanes);
      word |= __shfl_xor_sync(0xffffffffu, word, 2 * kLanes);
      if (block == i) stored = word;
    }
    const int step = block * kLanes + own;
    const int row = pos.warp_row + kStreamRows * step + pos.lane / kStreamLanes;
    if (block < kWords && row < tile.rows) {
      store_evict_last(args.exponents + ScaleWords(args.layout, tile, false).at(row), stored);
    }
  }
};

struct MxStream {
  static constexpr ScaleGranularity kGranularity = ScaleGranularity::k1x32;
  template <DType element>
  using Rows = MxStreamRows<element>;
  struct Columns {
    MxPartial partial;
    ColumnExponents exponents;
  };

  static __device__ __forceinline__ bool begin(const QuantizeArgs& args, const Tile& tile) {
    return begin_mx_tile(args, tile);
  }
  // The values of the tile are in `staged`.
  template <DType element, typename T>
  static __device__ __forceinline__ void write_transposed(const QuantizeArgs& args, const Tile& tile,
                                                          const StreamPosition& pos, Columns& columns,
                                                          StreamTile<T>& staged) {
    const int warp = threadIdx.x / kWarpSize;
    const int lane = pos.lane;
    TileFragment<T> values;
    staged.take(values, pos);
    find_partial(values, warp, lane, columns.partial);
    __syncthreads();
    find_column_exponents<element>(false, columns.partial, columns.exponents);
    __syncthreads();
    const uint32_t of_columns = *reinterpret_cast<const uint32_t*>(
        &columns.exponents.at[warp / kWarpsPerBlock][lane * kColsPerThread]);
    float scales[kColsPerThread];
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      scales[c] = e8m0_multiplier(static_cast<uint8_t>(of_columns >> (8 * c)));
    }
    write_column_exponents(args, tile, columns.exponents);
    write_columns<element, false>(args, tile, values, warp, lane, scales, staged.transposed_tile);
  }
};

}  // namespace transformer_plugin::quantize
