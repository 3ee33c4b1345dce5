#include "common/format.h"

#include <charconv>
#include <limits>
#include <string>

#include "common/check.h"

namespace transformer_plugin {
namespace {

constexpr const char* kGrammar =
    "a format key: none, bf16, fp8_tensor, fp8_block or mxfp8, then options like "
    "fp8_block:e4m3,pow2,square,eps=1e-12";

bool apply_option(Format& format, std::string_view option) {
  if (!format.is_quantized()) return false;
  if (option == "e4m3") {
    format.element = DType::kFloat8E4M3;
  } else if (option == "e5m2") {
    format.element = DType::kFloat8E5M2;
  } else if (option == "square" && format.has_blocks()) {
    format.square_blocks = true;
  } else if (format.family == FormatFamily::kMxFp8) {
    return false;  // E8M0 leaves nothing else to choose
  } else if (option == "pow2" || option == "fp32") {
    format.power_of_two_scales = option == "pow2";
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

}  // namespace

Format parse_format(const char* op, const char* argument, std::string_view key) {
  Format format;
  const size_t colon = key.find(':');
  const std::string_view family = key.substr(0, colon);
  bool valid = true;
  if (family == "none") {
    format.family = FormatFamily::kNone;
  } else if (family == "bf16") {
    format.family = FormatFamily::kBFloat16;
  } else if (family == "fp8_tensor") {
    format.family = FormatFamily::kFp8Tensor;
  } else if (family == "fp8_block") {
    format.family = FormatFamily::kFp8Block;
    format.power_of_two_scales = true;
  } else if (family == "mxfp8") {
    format.family = FormatFamily::kMxFp8;
    format.power_of_two_scales = true;
  } else {
    valid = false;
  }
  std::string_view rest = colon == std::string_view::npos ? std::string_view() : key.substr(colon + 1);
  valid = valid && (colon == std::string_view::npos || !rest.empty());
  while (valid && !rest.empty()) {
    const size_t comma = rest.find(',');
    valid = apply_option(format, rest.substr(0, comma));
    valid = valid && comma != rest.size() - 1;  // nothing after the last comma
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
  }
  TP_CHECK_VALUE(valid, op, argument, kGrammar, "'" << key << "'", "transformer_plugin.formats lists them");
  return format;
}

}  // namespace transformer_plugin
