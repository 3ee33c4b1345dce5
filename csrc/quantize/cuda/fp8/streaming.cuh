// Row-streaming kernels (tile/streaming_rows.cuh) for FP8 with FP32 scales of 1x128 blocks.
#pragma once

#include "quantize/cuda/fp8/tile.cuh"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {

// encode_scale for an amax that is at least epsilon, faster for power-of-two scales: only the exponent of
// largest / amax counts, which is a difference of bits whose borrow compares the mantissas (no quotient below
// 1 rounds up to it). Not for tiny amaxes, whose exponents would leave the range.
struct QuickScale {
  float least;    // smallest amax for which the fast path holds
  uint32_t bits;  // of the largest value times 2^127

  __device__ __forceinline__ explicit QuickScale(const ScaleRule& rule)
      : least(bits_to_float(rule.power_of_two ? 0x0d800000u : 0x7f800000u)),  // 2^-100, or never
        bits(float_to_bits(rule.largest) + 0x3f800000u) {
    keep_in_register(least);
    keep_in_register(bits);
  }

  __device__ __forceinline__ float of(float amax, const ScaleRule& rule) const {
    if (amax >= least && amax <= 3.40282347e38f) {
      return bits_to_float((bits - float_to_bits(amax)) & 0xff800000u);
    }
    return encode_scale(amax, rule);
  }
};

template <DType element>
struct Fp8StreamRows {
  QuickScale quick;
  int own;  // the step in which the lane keeps its row's scale
  float kept = 1.0f;

  __device__ __forceinline__ Fp8StreamRows(const QuantizeArgs& args, int lane)
      : quick(args.rule), own(lane % kStreamLanes * kStreamRows) {
    keep_in_register(own);
  }

  static __device__ __forceinline__ int row_of(int lane) {
    return lane % kStreamLanes * kStreamRows + lane / kStreamLanes;
  }
  template <typename T>
  __device__ __forceinline__ uint2 encode(const QuantizeArgs& args, const Packed8<T>& values, int r) {
    const float scale = quick.of(amax_of_lanes<kStreamLanes>(values, args.rule.epsilon), args.rule);
    if (own == r) kept = scale;
    return encode8<element>(values, scale);
  }
  __device__ __forceinline__ void finish(const QuantizeArgs& args, const Tile& tile,
                                         const StreamPosition& pos) const {
    const int row = pos.warp_row + row_of(pos.lane);
    if (row_of(pos.lane) < kRowsPerThread && row < tile.rows) {
      args.scale[scale_index(args.layout, tile, false, row, 0)] = tile.tail ? 0.0f : 1.0f / kept;
    }
  }
};

struct Fp8Stream {
  static constexpr ScaleGranularity kGranularity = ScaleGranularity::k1x128;
  template <DType element>
  using Rows = Fp8StreamRows<element>;
  using Columns = ColumnScales;

  static __device__ __forceinline__ bool begin(const QuantizeArgs& args, const Tile& tile) {
    return begin_tile(args, tile);
  }
  // The values of the tile are in `staged`.
  template <DType element, typename T>
  static __device__ __forceinline__ void write_transposed(const QuantizeArgs& args, const Tile& tile,
                                                          const StreamPosition& pos, Columns& columns,
                                                          StreamTile<T>& staged) {
    const int warp = threadIdx.x / kWarpSize;
    TileFragment<T> values;
    staged.take(values, pos);
    find_column_scales(args, tile, values, warp, pos.lane, columns);
    float scales[kColsPerThread];
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) scales[c] = columns.scales[pos.lane * kColsPerThread + c];
    write_columns<element>(args, tile, values, warp, pos.lane, scales, staged.transposed_tile);
  }
};

}  // namespace transformer_plugin::quantize
