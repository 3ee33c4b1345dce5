// Rows of FP8 back to floats, in the form of row_stream.cuh: two rows a step of a warp, 8 neighbouring columns to a lane.
#include "quantize/cuda/dequantize/common.cuh"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {
namespace {

// Bits of the upper ends of bytes say which of four codes are NaN or infinite; others mean nothing.
template <DType element>
__device__ __forceinline__ uint32_t special_codes(uint32_t codes) {
  return (codes & 0x7f7f7f7fu) + (element == DType::kFloat8E5M2 ? 0x04040404u : 0x01010101u);
}

template <typename T>
struct EightValues {
  Two<T> twos[kStreamCols / 2];
};

// Of numbers that are finite, whose products are no NaN; or of any.
template <typename T, DType element, bool finite>
__device__ __forceinline__ EightValues<T> decode8(uint2 codes, float scale) {
  const float2 pairs[] = {decode2<element>(codes.x & 0xffffu), decode2<element>(codes.x >> 16),
                          decode2<element>(codes.y & 0xffffu), decode2<element>(codes.y >> 16)};
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

// Not read again here, so that caches keep other lines.
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
    const StreamPlace place(tile);
    const int64_t first = (tile.member * layout.rows + place.row) * layout.cols + place.col;
    const int64_t stride = kStreamRows * layout.cols;
    const auto load = [&](int step) {
      return __ldg(reinterpret_cast<const uint2*>(args.data + first + step * stride));
    };
    uint2 codes[kStreamSteps];
#pragma unroll
    for (int s = 0; s < kStreamSteps; ++s) {
      codes[s] = {};
      if (s * kStreamRows < place.loads) codes[s] = load(s);
    }
    // Lane r has what the row r of the warp is scaled by.
    uint32_t held = 0;
    const int own = place.warp_row + place.lane;
    if (!tile.tail && place.lane < kRowsPerThread && own < tile.rows) held = row_scales(args, tile, own);
    const bool mx = layout.mode == ScaleMode::kMx;
    const int shift = place.lane % kStreamLanes * kStreamCols / kMxBlock * 8;
    const auto scale_of = [&](int step) {
      const uint32_t bits = __shfl_sync(0xffffffffu, held, step * kStreamRows + place.lane / kStreamLanes);
      if (tile.tail) return 0.0f;
      return mx ? e8m0_to_float(static_cast<uint8_t>(bits >> shift)) : __uint_as_float(bits);
    };
    T* output = static_cast<T*>(args.output) + first;
    uint32_t special = 0;
#pragma unroll
    for (int s = 0; s < kStreamSteps; ++s) {
      const float scale = scale_of(s);
      special |= special_codes<element>(codes[s].x) | special_codes<element>(codes[s].y);
      if (!(fabsf(scale) <= 3.40282347e38f)) special |= 0x80u;
      if (s * kStreamRows < place.rows) {
        store_eight(output + s * stride, decode8<T, element, true>(codes[s], scale));
      }
    }
    if (__any_sync(0xffffffffu, (special & 0x80808080u) != 0)) {  // rare: the same again, with care
#pragma unroll 1
      for (int s = 0; s < kStreamSteps; ++s) {
        const float scale = scale_of(s);
        if (s * kStreamRows < place.rows) {
          const uint2 again = s * kStreamRows < place.loads ? load(s) : uint2{};
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
  visit_device_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      dequantize_rows_kernel<decltype(type), decltype(element)::value>
          <<<block_grid(args.layout), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    });
  });
  check_launch("dequantize_rows_kernel");
  return true;
}

}  // namespace transformer_plugin::quantize
