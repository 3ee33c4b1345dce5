// Number formats: what a format key says. The Python twin is transformer_plugin/formats.py.
//
// A key is a family, then options after a colon, separated by commas:
//   none                  operands as they come
//   bf16                  element bfloat16, no scale
//   fp8_tensor            one FP32 scale per tensor, from its own amax now
//   fp8_block             one FP32 scale per 1x128 block along a row, or per 128x128 block with `square`
//   mxfp8                 one E8M0 scale per 1x32 block along a row, or per 32x32 block with `square`
//   nvfp4                 E2M1 under one E4M3 scale per 1x16 block along a row, or per 16x16 block with `square`, under
//                         one FP32 amax that the ops are given
// Options: e4m3 | e5m2 (element of the FP8 families, default e4m3); square; of fp8_tensor and fp8_block: pow2 | fp32
// (scales; default fp32 for fp8_tensor, pow2 for fp8_block) and eps=<float> (amax below it counts as it; default 0);
// of fp8_tensor and fp8_block too: aligned (each group of a ragged matrix begins at a multiple of 32 in a line of
// transposed data, with zeros between groups); of mxfp8 and nvfp4: tiled (scales in tiles of 128x4). Of nvfp4: e2m1
// (the element); rht (the transposed copy after a random Hadamard transform); sr (stochastic rounding); row_scaled
// (an amax for each row); 4over6 | 4over6_mse (blocks whose amax becomes 4 where the absolute or squared error is
// less than with 6). row_scaled and 4over6 go with none of square, rht and sr; square not with rht. Examples:
// "fp8_block:e4m3,pow2,square", "nvfp4:e2m1,rht,sr".
#pragma once

#include <cstdint>
#include <string_view>

#include "common/dtype.h"

namespace transformer_plugin {

enum class FormatFamily : int32_t { kNone, kBFloat16, kFp8Tensor, kFp8Block, kMxFp8, kNvFp4 };
enum class FourOverSix : int32_t { kNever, kMae, kMse };

struct Format {
  FormatFamily family = FormatFamily::kNone;
  DType element = DType::kFloat8E4M3;
  bool power_of_two_scales = false;
  bool square_blocks = false;  // 128x128 instead of 1x128, 32x32 instead of 1x32, 16x16 instead of 1x16
  float epsilon = 0.0f;
  bool random_hadamard = false;
  bool stochastic_rounding = false;
  bool row_scaled = false;
  FourOverSix four_over_six = FourOverSix::kNever;
  bool tiled_scales = false;
  bool aligned_groups = false;  // of transposed data of a ragged matrix

  bool is_quantized() const { return family == FormatFamily::kFp8Tensor || has_blocks(); }
  bool has_blocks() const { return family == FormatFamily::kFp8Block || has_byte_scales(); }
  bool has_byte_scales() const { return family == FormatFamily::kMxFp8 || is_nv(); }
  bool is_nv() const { return family == FormatFamily::kNvFp4; }
  // Elements in a byte of data.
  int64_t packing() const { return is_nv() ? 2 : 1; }
  // What widths must be a multiple of.
  int64_t block_size() const { return is_nv() ? 16 : (family == FormatFamily::kMxFp8 ? 32 : 1); }
  // Largest finite value of the FP8 element.
  float max() const { return element == DType::kFloat8E5M2 ? 57344.0f : 448.0f; }
};

// The format that `key` names; a four-part ValueError naming `op` and `argument` when it names none.
Format parse_format(const char* op, const char* argument, std::string_view key);

}  // namespace transformer_plugin
