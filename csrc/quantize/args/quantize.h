// Quantization to FP8: the arithmetic of scales, and the arguments of the kernels.
//
//   a = max(amax of the block in FP32, epsilon); NaN elements are ignored
//   scale = largest / a, or 1 if a is 0 or infinite; a scale that FP32 cannot hold becomes `overflow`
//   power-of-two scales: the mantissa of scale is cleared
//   q = float_to_fp8(float(x) * scale),  stored scale_inv = 1 / scale
// For MXFP8 (ScaleGranularity::k1x32) the E8M0 rule of common/e8m0.h replaces the first three lines.
// Source: the published conventions of per-tensor current scaling and of 1x128 and 128x128 block scaling in
// FP8 (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3; NVIDIA TransformerEngine
// recipe_common.cuh); OCP Microscaling Formats (MX) v1.0.
#pragma once

#include "common/e8m0.h"
#include "common/fp8.h"
#include "common/row_index_args.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

struct ScaleRule {
  float largest;   // finite value of the FP8 type
  float epsilon;   // lower bound of an amax
  float overflow;  // replaces a scale that FP32 cannot hold
  bool power_of_two;
};

struct QuantizeArgs {
  const void* input;  // [matrices, rows, cols], contiguous
  uint8_t* data;      // [matrices, rows, cols]
  float* scale;
  uint8_t* data_t;  // [matrices, cols, rows]
  float* scale_t;
  uint8_t* exponents;    // E8M0 scales: replace `scale` for ScaleGranularity::k1x32
  uint8_t* exponents_t;  // replace `scale_t`
  const float* amax;     // [matrices or groups], for ScaleGranularity::kPerTensor
  Layout layout;
  ScaleRule rule;
  DType dtype;
  DType element;
  bool rowwise;     // whether to write data and scale; a flag, because pointers of empty outputs may be null
  bool transposed;  // whether to write data_t and scale_t
  // Delayed scaling, for ScaleGranularity::kPerTensor only.
  const float* encode_scales = nullptr;  // [matrices or groups]: replace the scales computed from `amax`
  float* amax_out = nullptr;    // [matrices or groups]: becomes its maximum with the amax of the input
  const float* noop = nullptr;  // if *noop is 1, nothing is written
  // Rows read by an index, only for the launch_aligned_gather functions: row i of the matrix is row row_index[i] of the
  // input, which has `row_index.rows` rows. Without entries the rows of the input are those of the matrix.
  RowIndex row_index = {};
  WrongRowWord* wrong_row = nullptr;

  TP_HOST_DEVICE bool is_noop() const { return noop != nullptr && *noop == 1.0f; }
};

TP_HOST_DEVICE float encode_scale(float amax, const ScaleRule& rule) {
  const float a = amax < rule.epsilon ? rule.epsilon : amax;
  float scale = 1.0f;
  if (a > 0.0f && a <= 3.40282347e38f) {
    scale = rule.largest / a;
    if (scale > 3.40282347e38f) scale = rule.overflow;
  }
  return rule.power_of_two ? bits_to_float(float_to_bits(scale) & 0xff800000u) : scale;
}

// The scale of a matrix or group, for ScaleGranularity::kPerTensor.
TP_HOST_DEVICE float tensor_scale(const QuantizeArgs& args, int64_t group) {
  return args.encode_scales ? args.encode_scales[group] : encode_scale(args.amax[group], args.rule);
}

// Store the inverse scale of each matrix or group; nothing for other granularities.
void tensor_scales_cpu(const QuantizeArgs& args);
void launch_tensor_scales(const QuantizeArgs& args, void* stream);

void quantize_cpu(const QuantizeArgs& args);

// The CUDA kernels. select_launcher.h says which one quantizes given arguments.
void launch_quantize(const QuantizeArgs& args, void* stream);     // FP32 scales, any arguments
void launch_quantize_mx(const QuantizeArgs& args, void* stream);  // E8M0 scales, any arguments
// Ragged groups with transposed data: store whole cache lines although groups begin anywhere.
void launch_ragged_transpose(const QuantizeArgs& args, void* stream);
void launch_ragged_transpose_mx(const QuantizeArgs& args, void* stream);
// The same in the `aligned` layout for rows that are read by an index, with scales of blocks and per tensor.
void launch_aligned_gather(const QuantizeArgs& args, void* stream);
void launch_aligned_gather_tensor(const QuantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
