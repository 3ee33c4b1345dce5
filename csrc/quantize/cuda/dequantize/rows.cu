// Dequantizes row-wise FP8 data with rows of whole vectors to FP32, BF16 or FP16.
//
//   output[row][column] = round(float(data[row][column]) * scale of its block),  data: [matrices, rows, cols]
// Grid: block_grid(layout) blocks of 256 threads; a block loops over tiles of 128x128. Warp w holds rows 16w
// .. 16w + 15 and processes two per step; a lane holds 8 neighbouring columns. No shared memory.
#include "quantize/cuda/dequantize/common.cuh"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {
namespace {

// The top bit of each byte of the result is set if that element may be NaN or infinite; other bits are
// meaningless.
template <DType element>
__device__ __forceinline__ uint32_t nonfinite_bits(uint32_t bytes) {
  return (bytes & 0x7f7f7f7fu) + (element == DType::kFloat8E5M2 ? 0x04040404u : 0x01010101u);
}

template <typename T>
struct EightValues {
  Packed2<T> twos[kStreamCols / 2];
};

// With `finite` all elements and scales are finite, so that no product is NaN.
template <typename T, DType element, bool finite>
__device__ __forceinline__ EightValues<T> decode8(uint2 bytes, float scale) {
  const float2 pairs[] = {decode2<element>(bytes.x & 0xffffu), decode2<element>(bytes.x >> 16),
                          decode2<element>(bytes.y & 0xffffu), decode2<element>(bytes.y >> 16)};
  EightValues<T> values;
#pragma unroll
  for (int i = 0; i < kStreamCols / 2; ++i) {
    const float x = pairs[i].x * scale, y = pairs[i].y * scale;
    if constexpr (finite) {
      values.twos[i] = two_from_floats<T>(x, y);
    } else {
      values.twos[i].x = round_to<T>(x);
      values.twos[i].y = round_to<T>(y);
    }
  }
  return values;
}

// Streaming stores: the output is not read again here.
template <typename T>
__device__ __forceinline__ void store_eight(T* output, const EightValues<T>& values) {
  uint4 vectors[sizeof(values) / sizeof(uint4)];
  memcpy(vectors, &values, sizeof(values));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(uint4)); ++i) {
    __stcs(reinterpret_cast<uint4*>(output) + i, vectors[i]);
  }
}

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeArgs args) {
  const Layout& layout = args.layout;
  for_each_tile(layout, [&](const Tile& tile) {
    const StreamPosition pos(tile);
    const int64_t first = (tile.matrix * layout.rows + pos.row) * layout.cols + pos.col;
    const int64_t stride = kStreamRows * layout.cols;
    const auto load = [&](int step) {
      return __ldg(reinterpret_cast<const uint2*>(args.data + first + step * stride));
    };
    uint2 bytes[kStreamSteps];
#pragma unroll
    for (int s = 0; s < kStreamSteps; ++s) {
      bytes[s] = {};
      if (s * kStreamRows < pos.loads) bytes[s] = load(s);
    }
    // Lane r holds the scales of row r of the warp.
    uint32_t scale_bits = 0;
    const int own = pos.warp_row + pos.lane;
    if (!tile.tail && pos.lane < kRowsPerThread && own < tile.rows) scale_bits = row_scales(args, tile, own);
    const bool mx = layout.granularity == ScaleGranularity::k1x32;
    const int shift = pos.lane % kStreamLanes * kStreamCols / kMxBlock * 8;
    const auto scale_of = [&](int step) {
      const uint32_t bits =
          __shfl_sync(0xffffffffu, scale_bits, step * kStreamRows + pos.lane / kStreamLanes);
      if (tile.tail) return 0.0f;
      return mx ? e8m0_to_float(static_cast<uint8_t>(bits >> shift)) : __uint_as_float(bits);
    };
    T* output = static_cast<T*>(args.output) + first;
    uint32_t special = 0;
#pragma unroll
    for (int s = 0; s < kStreamSteps; ++s) {
      const float scale = scale_of(s);
      special |= nonfinite_bits<element>(bytes[s].x) | nonfinite_bits<element>(bytes[s].y);
      if (!(fabsf(scale) <= 3.40282347e38f)) special |= 0x80u;
      if (s * kStreamRows < pos.rows) {
        store_eight(output + s * stride, decode8<T, element, true>(bytes[s], scale));
      }
    }
    if (__any_sync(0xffffffffu, (special & 0x80808080u) != 0)) {  // rare: repeat with NaN handling
#pragma unroll 1
      for (int s = 0; s < kStreamSteps; ++s) {
        const float scale = scale_of(s);
        if (s * kStreamRows < pos.rows) {
          const uint2 again = s * kStreamRows < pos.loads ? load(s) : uint2{};
          store_eight(output + s * stride, decode8<T, element, false>(again, scale));
        }
      }
    }
  });
}

}  // namespace

bool launch_dequantize_rows(const DequantizeArgs& args, void* stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.data) % sizeof(uint2) == 0 &&
                       reinterpret_cast<uintptr_t>(args.output) % sizeof(uint4) == 0;
  if (args.transposed || args.layout.cols % kStreamCols != 0 || !aligned) return false;
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    dequantize_rows_kernel<decltype(type), decltype(element)::value>
        <<<block_grid(args.layout), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("dequantize_rows_kernel");
  return true;
}

}  // namespace transformer_plugin::quantize
