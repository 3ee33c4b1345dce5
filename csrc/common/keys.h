// What keys such as "fp8_block:e4m3,square" share: options after a colon, separated by commas, and the names that errors list.
#pragma once

#include <string>
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

// "a, b or c": the names of the rows of a table that `wanted` is true for.
template <typename Table, typename Wanted>
std::string names_in(const Table& table, Wanted&& wanted) {
  std::string text, last;
  for (const auto& row : table) {
    if (!wanted(row)) continue;
    if (!last.empty()) text += (text.empty() ? "" : ", ") + last;
    last = row.name;
  }
  return text.empty() ? last : text + " or " + last;
}

}  // namespace transformer_plugin
