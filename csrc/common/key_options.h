// The options of a key such as "fp8_block:e4m3,square": after a colon, separated by commas.
#pragma once

#include <string_view>

namespace transformer_plugin {

// Calls `apply(option)` for each option of `key`; false if one is empty or `apply` returns false, and for a colon without options.
template <typename Apply>
bool apply_options(std::string_view key, Apply&& apply) {
  const size_t colon = key.find(':');
  if (colon == std::string_view::npos) return true;
  for (std::string_view rest = key.substr(colon + 1);;) {
    const size_t comma = rest.find(',');
    const std::string_view option = rest.substr(0, comma);
    if (option.empty() || !apply(option)) return false;
    if (comma == std::string_view::npos) return true;
    rest = rest.substr(comma + 1);
  }
}

}  // namespace transformer_plugin
