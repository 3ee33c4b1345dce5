// Number formats: what a format key says. The Python twin is transformer_plugin/formats.py.
//
// A key is a family, then options after a colon, separated by commas:
//   none                  operands as they come
//   bf16                  element bfloat16, no scale
//   fp8_tensor            one FP32 scale per tensor, from its own amax now
//   fp8_block             one FP32 scale per 1x128 block along a row, or per 128x128 block with `square`
//   mxfp8                 one E8M0 scale per 1x32 block along a row, or per 32x32 block with `square`
// Options: e4m3 | e5m2 (element, default e4m3); square; and of the first two families with scales: pow2 | fp32 (scales;
// default fp32 for fp8_tensor, pow2 for fp8_block); eps=<float> (amax below it counts as it; default 0). Example:
// "fp8_block:e4m3,pow2,square".
#pragma once

#include <cstdint>
#include <string_view>

#include "common/dtype.h"

namespace transformer_plugin {

enum class FormatFamily : int32_t { kNone, kBFloat16, kFp8Tensor, kFp8Block, kMxFp8 };

struct Format {
  FormatFamily family = FormatFamily::kNone;
  DType element = DType::kFloat8E4M3;
  bool power_of_two_scales = false;
  bool square_blocks = false;  // 128x128 instead of 1x128, 32x32 instead of 1x32
  float epsilon = 0.0f;

  bool is_quantized() const { return family == FormatFamily::kFp8Tensor || has_blocks(); }
  bool has_blocks() const { return family == FormatFamily::kFp8Block || family == FormatFamily::kMxFp8; }
  // Largest finite value of the element.
  float max() const { return element == DType::kFloat8E5M2 ? 57344.0f : 448.0f; }
};

inline constexpr int64_t kMxBlockSize = 32;

// The format that `key` names; a four-part ValueError naming `op` and `argument` when it names none.
Format parse_format(const char* op, const char* argument, std::string_view key);

}  // namespace transformer_plugin
