// NVFP4: the arithmetic of scales and of the random Hadamard transform, and the arguments of the kernels.
//
//   S     = min(bound * 6 / amax, largest float) for the whole matrix, or 1 if amax or that minimum is 0;
//           bound = 448, or 256 for four-over-six
//   scale = E4M3(amax of the block * (S * (1 / 6))), saturating
//   q     = E2M1(x * min(1 / (float(scale) * (1 / S)), largest float))
//   value = q * ((float(scale) * amax) * (1 / (bound * 6)))
// Four-over-six encodes a block twice: with target = amax of the block / 6 * S, once with E4M3(target) and once
// with E4M3(1.5 * target), so that the largest magnitude becomes 4. It keeps the second if its error is smaller;
// the error sums |q * scale * amax / (bound * 6) - x|, or its square, in index order. Both quotients are rounded
// ones: they are not the products with 1 / 6 and 1 / (bound * 6) above.
// Source: the NVFP4 recipe of NVIDIA TransformerEngine 2.20 and "Pretraining Large Language Models with
// NVFP4", arXiv:2509.25149; four-over-six: arXiv:2512.02010, with the order of TransformerEngine's operations.
//
// Transposed data has blocks of 16 rows, so each group must have whole blocks. The host cannot check group
// sizes in GPU memory. If they violate this, 16 rows of the buffer (counted from its start) that are not one
// block of one group get data 0, and a block that is not such 16 rows gets the scale NaN (0x7F). Thus a
// violation is visible in the result, and no byte is written by two tiles: the tile that holds the first of
// the 16 rows writes their data.
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
  const void* input;  // [matrices, rows, cols], contiguous
  uint8_t* data;      // [matrices, rows, cols / 2]
  uint8_t* scale;
  uint8_t* data_t;  // [matrices, cols, rows / 2]
  uint8_t* scale_t;
  const float* amax;  // of the rows: [matrices or groups], or one per row with `row_scaled`
  // Of the columns, after the transform: [matrices or groups], or [matrices or groups, cols] with
  // `row_scaled`.
  const float* amax_t;
  const int64_t* seed;  // for kStochastic
  Layout layout;
  DType dtype;
  NvMethod method;
  bool hadamard;  // transform the columns before quantizing them
  bool row_scaled;
  bool rowwise;     // whether to write data and scale; a flag, because pointers of empty outputs may be null
  bool transposed;  // whether to write data_t and scale_t
  const float* noop;  // if *noop is 1, nothing is written; may be null

  TP_HOST_DEVICE bool is_noop() const { return noop != nullptr && *noop == 1.0f; }
};

inline constexpr float kLargestFloat = 3.40282347e38f;

TP_HOST_DEVICE float nv_bound(NvMethod method) { return is_four_over_six(method) ? 256.0f : 448.0f; }

// The global scale of a matrix, or of a row with `row_scaled`, that is applied before the scales of blocks.
struct NvGlobal {
  float factor;   // S * (1 / 6), or S with four-over-six
  float inverse;  // 1 / S
  float amax;     // of the matrix or row; four-over-six alone uses it
};

TP_HOST_DEVICE NvGlobal nv_global(float amax, NvMethod method) {
  const float quotient = nv_bound(method) * 6.0f / amax;
  float s = quotient < kLargestFloat ? quotient : kLargestFloat;
  if (amax == 0.0f || s == 0.0f) s = 1.0f;
  return {is_four_over_six(method) ? s : s * (1.0f / 6.0f), 1.0f / s, amax};
}

// What the scale of a block is rounded from. `factor` is that of NvGlobal.
TP_HOST_DEVICE float nv_target(float block_amax, float factor, bool four_over_six) {
  return (four_over_six ? block_amax / 6.0f : block_amax) * factor;
}

TP_HOST_DEVICE uint8_t nv_e4m3(float value) {
#if defined(__CUDA_ARCH__)
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
  return float_to_fp8<DType::kFloat8E4M3>(value);
#endif
}

TP_HOST_DEVICE float nv_e4m3_to_float(uint8_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
#else
  return fp8_to_float<DType::kFloat8E4M3>(bits);
#endif
}

// The scale of a block: its E4M3 bits, their value, and the factor that encodes elements.
struct NvScale {
  uint8_t bits;
  float value;
  float encode;
};

// `inverse` is that of NvGlobal.
TP_HOST_DEVICE NvScale nv_scale(float target, float inverse) {
  NvScale scale;
  scale.bits = nv_e4m3(target < kLargestFloat ? target : kLargestFloat);
  scale.value = nv_e4m3_to_float(scale.bits);
  const float encode = 1.0f / (scale.value * inverse);
  scale.encode = encode < kLargestFloat ? encode : kLargestFloat;
  return scale;
}

// What one element adds to the error of a block's encoding with four-over-six. `scale` is the value of the
// block's scale, `amax` that of the matrix. The result is NaN for a NaN, and for 0 where the amax is infinite.
TP_HOST_DEVICE float nv_error(float value, uint32_t bits, float scale, float amax, bool squared) {
  const float difference = e2m1_to_float(bits) * scale * amax / (256.0f * 6.0f) - value;
  return squared ? difference * difference : fabsf(difference);
}

// Random bytes for the 16 elements of a block, from the number of the block and the direction (0 row-wise, 1
// transposed). Element i uses byte i % 4 of word i / 4.
TP_HOST_DEVICE Philox4 nv_random(uint64_t seed, int64_t block, uint32_t direction) {
  return philox(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), direction, 0u);
}

// The sign that element i of 16 is multiplied by before its Hadamard transform.
TP_HOST_DEVICE constexpr bool nv_is_negated(int i) { return (0xd7e8 >> i) & 1; }

void quantize_nv_cpu(const NvArgs& args);
// On CUDA, for inputs of one dtype: kBFloat16, kFloat16 or kFloat32 (select_launcher.h).
template <DType dtype>
void launch_quantize_nv(const NvArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
