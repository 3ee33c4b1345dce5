// The gradient of router logits with BF16 operands. The FP32 gradient of the logits is split into two BF16
// parts, so that tensor cores multiply it with the operands as they are:
//
//   grad_input  = [high low] [tokens, 2 experts] x the weight twice [2 experts, hidden]
//   grad_weight = high^T x input + low^T x input, both in one product [2 experts, hidden]
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::routing {

// The bits of two BF16 values.
struct BFloat16Parts {
  uint16_t high, low;
};

// The upper half of FP32 bits after rounding to nearest even. Not for NaN.
TP_HOST_DEVICE uint32_t rounded_to_bfloat16(uint32_t bits) {
  return (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
}

// high = bf16(value), low = bf16(value - high), where the difference is exact. |value - (high + low)| is at
// most 2^-17 |value| where |value| >= 2^-109. Every finite value has finite parts: where rounding would give
// infinity, high is the largest BF16 number. Infinity and NaN have low = 0, because their difference would be
// NaN.
TP_HOST_DEVICE BFloat16Parts split_into_bfloat16(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u, kMagnitude = 0x7fffffffu, kQuietNaN = 0x00400000u;
  const uint32_t bits = float_to_bits(value);
  if ((bits & kMagnitude) >= kInfinity) {
    const uint32_t high = (bits & kMagnitude) > kInfinity ? bits | kQuietNaN : bits;
    return {static_cast<uint16_t>(high >> 16), 0};
  }
  const uint32_t nearest = rounded_to_bfloat16(bits);
  const uint32_t high = (nearest & kMagnitude) < kInfinity ? nearest : bits & 0xffff0000u;
  const uint32_t low = rounded_to_bfloat16(float_to_bits(value - bits_to_float(high)));
  return {static_cast<uint16_t>(high >> 16), static_cast<uint16_t>(low >> 16)};
}

struct SplitGradientArgs {
  const float* grad;       // [tokens, experts]
  uint16_t* parts;         // BF16 [tokens, 2 experts]: the high parts of a row, then its low parts
  const uint16_t* weight;  // BF16 [experts, hidden]; null: no copy of it
  uint16_t* weight_twice;  // BF16 [2 experts, hidden]
  int64_t tokens, experts, hidden;
};

// output[i] = bf16(sums[i] + sums[size + i])
struct AddHalvesArgs {
  const float* sums;  // [2, size]
  void* output;       // BF16 [size]
  int64_t size;
};

void split_gradient_cpu(const SplitGradientArgs& args);
void add_halves_cpu(const AddHalvesArgs& args);
void launch_split_gradient(const SplitGradientArgs& args, void* stream);
void launch_add_halves(const AddHalvesArgs& args, void* stream);

}  // namespace transformer_plugin::routing
