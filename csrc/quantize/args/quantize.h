// Quantizing a matrix: the arithmetic of scales, and what its kernels are given.
//
//   a = amax of the block, in the input's values, NaN left out;  a = max(a, epsilon)
//   scale = 1 if a is 0 or infinite, else largest / a in FP32; an infinite scale becomes `overflow`
//   power-of-two scales: the mantissa of scale cleared
//   scale_inv = 1 / scale,  q = float_to_fp8(float(x) * scale)
// Microscaled (ScaleMode::kMx): the E8M0 rule of common/e8m0.h in place of the first three lines.
// Source: the published conventions of per-tensor current scaling and of 1x128 and 128x128 block scaling in
// FP8 (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3; NVIDIA TransformerEngine
// recipe_common.cuh); OCP Microscaling Formats (MX) v1.0.
#pragma once

#include "common/e8m0.h"
#include "common/fp8.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

struct ScaleRule {
  float largest;   // finite value of the element
  float epsilon;   // an amax below it counts as it
  float overflow;  // stands for a scale that FP32 cannot hold
  bool power_of_two;
};

struct QuantizeArgs {
  const void* input;  // [members, rows, cols] contiguous
  uint8_t* data;      // [members, rows, cols]
  float* scale;
  uint8_t* data_t;  // [members, cols, rows]
  float* scale_t;
  uint8_t* exponents;    // E8M0, in place of `scale` for ScaleMode::kMx
  uint8_t* exponents_t;  // in place of `scale_t`
  const float* amax;     // [members or groups] of ScaleMode::kTensor
  Layout layout;
  ScaleRule rule;
  DType dtype;
  DType element;
  bool rowwise;     // whether data and scale are asked for: their pointers may be null for being empty
  bool transposed;  // data_t and scale_t
  // Delayed scaling, ScaleMode::kTensor only.
  const float* given = nullptr;  // encode scales [members or groups], in place of those of `amax`
  float* collected = nullptr;    // [members or groups], raised to the amax of what is read
  const float* noop = nullptr;   // 1: nothing is written

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

// The scale of a tensor, or of a group.
TP_HOST_DEVICE float tensor_scale(const QuantizeArgs& args, int64_t group) {
  return args.given ? args.given[group] : encode_scale(args.amax[group], args.rule);
}

// The stored scale of each tensor or group, where there is one for all of it.
void tensor_scales_cpu(const QuantizeArgs& args);
void launch_tensor_scales(const QuantizeArgs& args, void* stream);

void quantize_cpu(const QuantizeArgs& args);
void launch_quantize(const QuantizeArgs& args, void* stream);
// Transposed data of ragged groups, where its lines can be stored whole; false where it does not take them.
bool launch_quantize_walk(const QuantizeArgs& args, void* stream);
void launch_quantize_mx(const QuantizeArgs& args, void* stream);
// Transposed data of ragged groups, by windows of the buffer; false where it does not take them.
bool launch_quantize_mx_windows(const QuantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
