// Number formats, parsed from format keys. The Python counterpart is transformer_plugin/formats.py.
//
// A key is a family, then options after a colon, separated by commas:
//   none                  operands in their own dtype
//   bf16                  element bfloat16, no scale
//   fp8_tensor            one FP32 scale per tensor, from its current amax
//   fp8_row               one FP32 scale per row
//   fp8_block             one FP32 scale per 1x128 block along a row, or per 128x128 block with `square`
//   mxfp8                 one E8M0 scale per 1x32 block along a row, or per 32x32 block with `square`
//   nvfp4                 E2M1 with one E4M3 scale per 1x16 block along a row, or per 16x16 block with
//                         `square`, and one global FP32 scale from an amax that the caller passes
// Options:
//   e4m3 | e5m2           FP8 families: the element, default e4m3
//   square                square blocks
//   pow2 | fp32           fp8_tensor, fp8_row and fp8_block: scales; default pow2 for fp8_block, fp32 for the others
//   eps=<float>           fp8_tensor, fp8_row and fp8_block: lower bound of an amax, default 0
//   aligned               fp8_tensor and fp8_block: each group of a ragged matrix begins at a multiple of
//                         32 in the rows of transposed data, with zeros between groups
//   tiled                 mxfp8 and nvfp4: scales in tiles of 128x4
//   e2m1                  nvfp4: the element
//   rht                   nvfp4: random Hadamard transform of transposed data
//   sr                    nvfp4: stochastic rounding
//   row_scaled            nvfp4: an amax per row
//   4over6 | 4over6_mse   nvfp4: the amax of a block becomes 4 if the absolute or squared error is
//                         less than with 6
// row_scaled and 4over6 exclude square, rht and sr; square excludes rht. Examples:
// "fp8_block:e4m3,pow2,square",
// "nvfp4:e2m1,rht,sr".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/dtype.h"

namespace transformer_plugin {

enum class FormatFamily : int32_t { kNone, kBFloat16, kFp8Tensor, kFp8Row, kFp8Block, kMxFp8, kNvFp4 };

// What the ops have for a family. They ask for a trait, not for a family by name.
struct FormatFamilyTraits {
  std::string_view name;
  bool has_scales = false;
  bool has_row_scales = false;   // one scale per row of the whole matrix
  bool has_list_kernel = false;  // quantize_list takes many matrices in one launch
  bool has_fused_ops = false;    // activation_quantize, rms_norm_quantize, requantize_transposed and the like
  // The columns of a ragged matrix can be quantized. If not, weight gradients take unquantized operands.
  bool has_group_columns = false;
};

// In the order of FormatFamily.
inline constexpr FormatFamilyTraits kFormatFamilies[] = {
    {"none"},
    {"bf16"},
    {"fp8_tensor", true, false, true, true, true},
    {"fp8_row", true, true, false, false, false},
    {"fp8_block", true, false, true, true, true},
    {"mxfp8", true, false, true, true, true},
    {"nvfp4", true, false, true, true, true},
};

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
  bool aligned_groups = false;  // for transposed data of a ragged matrix

  const FormatFamilyTraits& traits() const { return kFormatFamilies[static_cast<int32_t>(family)]; }
  bool is_quantized() const { return traits().has_scales; }
  bool has_blocks() const { return family == FormatFamily::kFp8Block || has_byte_scales(); }
  bool has_byte_scales() const { return family == FormatFamily::kMxFp8 || is_nv(); }
  bool is_nv() const { return family == FormatFamily::kNvFp4; }
  // Elements per byte of data.
  int64_t packing() const { return is_nv() ? 2 : 1; }
  // Widths must be a multiple of it.
  int64_t block_size() const { return is_nv() ? 16 : (family == FormatFamily::kMxFp8 ? 32 : 1); }
  // Largest finite value of the FP8 element.
  float max() const { return element == DType::kFloat8E5M2 ? 57344.0f : 448.0f; }
};

// The names of the families that have `trait`, as "fp8_tensor, mxfp8 or nvfp4".
std::string families_with(bool FormatFamilyTraits::*trait);

// Parses `key`; raises a four-part ValueError naming `op` and `argument` if it is not a format.
Format parse_format(const char* op, const char* argument, std::string_view key);

}  // namespace transformer_plugin
