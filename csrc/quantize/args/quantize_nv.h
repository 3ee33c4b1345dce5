// NVFP4: the arithmetic of its scales and of its random Hadamard transform, and what its kernels are given.
//
//   S     = min(bound * 6 / amax, largest float) of the whole matrix; 1 if amax or that is 0. bound = 448, or 256 of
//           four-over-six
//   scale = E4M3(amax of the block * (S * (1 / 6))), saturating
//   q     = E2M1(x * min(1 / (float(scale) * (1 / S)), largest float))
//   value = q * ((float(scale) * amax) * (1 / (bound * 6)))
// Four-over-six makes two codings of a block, with `scale` and with 1.5 times as much (so that the largest becomes 4),
// and keeps the second where its summed error is less.
// Source: the NVFP4 recipe of NVIDIA TransformerEngine 2.20 and "Pretraining Large Language Models with NVFP4",
// arXiv:2509.25149; four-over-six: arXiv:2512.02010.
//
// Transposed data has blocks of 16 rows, and groups of whole blocks. Group sizes on a GPU, which nobody can refuse, may
// break that. Then 16 rows of the buffer, counted from its first, that are not one block of one group have codes 0, and a
// block that is not such 16 rows has the scale NaN (0x7F). So nothing is silently wrong, and no byte has two writers:
// the codes of 16 rows are written by the tile that holds their first.
#pragma once

#include "common/dtype.h"
#include "common/fp4.h"
#include "common/fp8.h"
#include "common/philox.h"
#include "quantize/args/layout.h"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace transformer_plugin::quantize {

enum class NvMethod : int32_t {
  kNearest,
  kStochastic,
  kFourOverSixMae,
  kFourOverSixMse,
};

TP_HOST_DEVICE bool is_four_over_six(NvMethod method) {
  return method == NvMethod::kFourOverSixMae || method == NvMethod::kFourOverSixMse;
}

struct NvArgs {
  const void* input;  // [members, rows, cols] contiguous
  uint8_t* data;      // [members, rows, cols / 2]
  uint8_t* scale;
  uint8_t* data_t;  // [members, cols, rows / 2]
  uint8_t* scale_t;
  const float* amax;  // of the rows: [members or groups], or of each row with `row_scaled`
  const float*
      amax_t;  // of the columns, after the transform: likewise, [members or groups, cols] with `row_scaled`
  const int64_t* seed;  // of kStochastic
  Layout layout;
  DType dtype;
  NvMethod method;
  bool hadamard;  // of the columns
  bool row_scaled;
  bool rowwise;       // whether data and scale are asked for: their pointers may be null for being empty
  bool transposed;    // data_t and scale_t
  const float* noop;  // 1: nothing is written. Or null

  TP_HOST_DEVICE bool is_noop() const { return noop != nullptr && *noop == 1.0f; }
};

inline constexpr float kLargestFloat = 3.40282347e38f;

TP_HOST_DEVICE float nv_bound(NvMethod method) { return is_four_over_six(method) ? 256.0f : 448.0f; }

// What a matrix, or a row of a matrix, is scaled by before its blocks are.
struct NvGlobal {
  float sixth;    // S * (1 / 6)
  float inverse;  // 1 / S
};

TP_HOST_DEVICE NvGlobal nv_global(float amax, float bound) {
  const float quotient = bound * 6.0f / amax;
  float s = quotient < kLargestFloat ? quotient : kLargestFloat;
  if (amax == 0.0f || s == 0.0f) s = 1.0f;
  return {s * (1.0f / 6.0f), 1.0f / s};
}

TP_HOST_DEVICE uint8_t nv_e4m3(float value) {
#if defined(__CUDA_ARCH__)
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
  return float_to_fp8<DType::kFloat8E4M3>(value);
#endif
}

TP_HOST_DEVICE float nv_e4m3_to_float(uint8_t code) {
#if defined(__CUDA_ARCH__)
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
#else
  return fp8_to_float<DType::kFloat8E4M3>(code);
#endif
}

// What a code is multiplied by to be near the input again, and its inverse, which the input is multiplied by.
struct NvScale {
  uint8_t code;
  float decode;
  float encode;
};

TP_HOST_DEVICE NvScale nv_scale(float target, const NvGlobal& global) {
  NvScale scale;
  scale.code = nv_e4m3(target < kLargestFloat ? target : kLargestFloat);
  scale.decode = nv_e4m3_to_float(scale.code) * global.inverse;
  const float encode = 1.0f / scale.decode;
  scale.encode = encode < kLargestFloat ? encode : kLargestFloat;
  return scale;
}

// What a value adds to the error of a block's coding; NaN adds nothing.
TP_HOST_DEVICE float nv_error(float value, uint32_t code, float decode, bool squared) {
  const float difference = e2m1_to_float(code) * decode - value;
  const float error = squared ? difference * difference : fabsf(difference);
  return value == value ? error : 0.0f;
}

// Random bytes of the 16 elements of a block: its number, and 0 for rows or 1 for transposed data. Element i takes byte
// i % 4 of word i / 4.
TP_HOST_DEVICE Philox4 nv_random(uint64_t seed, int64_t block, uint32_t direction) {
  return philox(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), direction, 0u);
}

// The sign of element i of a chunk before its Hadamard transform.
TP_HOST_DEVICE constexpr bool nv_is_negated(int i) { return (0xd7e8 >> i) & 1; }

void quantize_nv_cpu(const NvArgs& args);
void launch_quantize_nv(const NvArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
