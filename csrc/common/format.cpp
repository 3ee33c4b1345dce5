// The parser of format keys (common/format.h).
#include "common/format.h"

#include <charconv>
#include <iterator>
#include <limits>
#include <string>

#include "common/check.h"
#include "common/keys.h"

namespace transformer_plugin {
namespace {

std::string grammar() {
  return "a format key: " + names_in(kFormatFamilies, [](const FormatFamilyTraits&) { return true; }) +
         ", then options like fp8_block:e4m3,pow2,square,eps=1e-12";
}

bool apply_nv_option(Format& format, std::string_view option) {
  if (option == "rht") {
    format.random_hadamard = true;
  } else if (option == "sr") {
    format.stochastic_rounding = true;
  } else if (option == "row_scaled") {
    format.row_scaled = true;
  } else if (option == "4over6" || option == "4over6_mse") {
    format.four_over_six = option == "4over6" ? FourOverSix::kMae : FourOverSix::kMse;
  } else {
    return option == "e2m1";
  }
  return true;
}

bool apply_option(Format& format, std::string_view option) {
  if (option == "nan") return format.family != FormatFamily::kNone;  // used by layers: linear/operands.h
  if (!format.is_quantized()) return false;
  if (option == "square" && format.has_blocks()) {
    format.square_blocks = true;
  } else if (option == "tiled" && format.has_byte_scales()) {
    format.tiled_scales = true;
  } else if (format.is_nv()) {
    return apply_nv_option(format, option);
  } else if (option == "e4m3") {
    format.element = DType::kFloat8E4M3;
  } else if (option == "e5m2") {
    format.element = DType::kFloat8E5M2;
  } else if (format.family == FormatFamily::kMxFp8) {
    return false;  // no other options with E8M0 scales
  } else if (option == "pow2" || option == "fp32") {
    format.power_of_two_scales = option == "pow2";
  } else if (option == "aligned" && format.traits().has_group_columns) {
    format.aligned_groups = true;
  } else if (option.starts_with("eps=")) {
    const std::string_view number = option.substr(4);
    const auto result = std::from_chars(number.data(), number.data() + number.size(), format.epsilon);
    const bool read = result.ec == std::errc() && result.ptr == number.data() + number.size();
    return read && format.epsilon >= 0.0f && format.epsilon < std::numeric_limits<float>::infinity();
  } else {
    return false;
  }
  return true;
}

// Whether the options are compatible.
bool agrees(const Format& format) {
  const bool alone = format.row_scaled || format.four_over_six != FourOverSix::kNever;
  const bool others = format.square_blocks || format.random_hadamard || format.stochastic_rounding;
  return !(alone && others) && !(format.square_blocks && format.random_hadamard);
}

}  // namespace

std::string families_with(bool FormatFamilyTraits::*trait) {
  return names_in(kFormatFamilies, [&](const FormatFamilyTraits& family) { return family.*trait; });
}

Format parse_format(const char* op, const char* argument, std::string_view key) {
  Format format;
  const size_t colon = key.find(':');
  const std::string_view family = key.substr(0, colon);
  bool valid = false;
  for (size_t i = 0; i < std::size(kFormatFamilies); ++i) {
    if (family != kFormatFamilies[i].name) continue;
    valid = true;
    format.family = static_cast<FormatFamily>(i);
  }
  format.power_of_two_scales =
      format.family == FormatFamily::kFp8Block || format.family == FormatFamily::kMxFp8;
  if (format.is_nv()) format.element = DType::kFloat4E2M1;
  valid = valid && apply_options(key, [&](std::string_view option) { return apply_option(format, option); });
  valid = valid && agrees(format);
  TP_CHECK_VALUE(valid, op, argument, grammar(), "'" << key << "'", "transformer_plugin.formats lists them");
  return format;
}

}  // namespace transformer_plugin
