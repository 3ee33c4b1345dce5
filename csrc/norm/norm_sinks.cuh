// Shared by the sinks that quantize to FP8: maxima of units and stores of quantized data.
#pragma once

#include "norm/norm_kernel.cuh"
#include "norm/norm_quantize.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::norm {

// The element of all recipes; others use norm_loop_kernel.
inline constexpr DType kElement = DType::kFloat8E4M3;

inline bool fits_registers(const NormArgs& args, const QuantizeArgs& output) {
  return output.element == kElement && fits_registers(args);
}

// NaN is ignored.
__device__ __forceinline__ float max_of_unit(uint4 unit) {
  quantize::Packed2<BFloat16> twos[kUnit / 2], largest = quantize::zeros<BFloat16>();
  memcpy(twos, &unit, sizeof(unit));
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) largest = quantize::max_abs(largest, twos[i]);
  uint32_t word;
  memcpy(&word, &largest, sizeof(word));
  return fmaxf(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// Maxima of the units of kLanes neighbouring lanes, up to 8 in each.
template <int kLanes>
struct UnitMaxima : quantize::DistributedMaxima<kLanes, kMostUnits> {
  template <int kUnits>
  __device__ __forceinline__ UnitMaxima(const Units<kUnits>& x, int lane) {
#pragma unroll
    for (int k = 0; k < kMostUnits; ++k) this->at[k] = k < kUnits ? max_of_unit(x.at[k % kUnits]) : 0.0f;
    this->distribute(lane);
  }
};

__device__ __forceinline__ uint2 encode_unit(uint4 unit, float scale) {
  const Floats<BFloat16> v(unit);
  using quantize::encode4;
  return {encode4<kElement>(v.at[0] * scale, v.at[1] * scale, v.at[2] * scale, v.at[3] * scale).word,
          encode4<kElement>(v.at[4] * scale, v.at[5] * scale, v.at[6] * scale, v.at[7] * scale).word};
}

// Stores the quantized data of a row; `scale_of(k)` is the scale of unit k in all lanes of a warp.
template <int kUnits, typename ScaleOf, typename Reload>
__device__ __forceinline__ void store_encoded(uint8_t* data, const Units<kUnits>& x,
                                              const RowFragment<kUnits>& part, int64_t row,
                                              ScaleOf&& scale_of, Reload&& reload) {
  uint2* target = reinterpret_cast<uint2*>(data) + row * part.units + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint2 bytes = encode_unit(x.at[k], scale_of(k));
    reload(k);
    if (part.has(k)) target[k * kThreads] = bytes;
  }
}

}  // namespace transformer_plugin::norm
