// The key of an activation in an autograd node. The default is not saved: a string costs an allocation in every forward.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <string_view>

namespace transformer_plugin::activation {

inline constexpr std::string_view kDefaultKey = "swiglu";

inline void save_key(torch::autograd::AutogradContext* ctx, std::string_view key) {
  if (key != kDefaultKey) ctx->saved_data["activation"] = std::string(key);
}

inline std::string_view saved_key(torch::autograd::AutogradContext* ctx) {
  const auto key = ctx->saved_data.find("activation");
  return key == ctx->saved_data.end() ? kDefaultKey : std::string_view(key->second.toStringRef());
}

}  // namespace transformer_plugin::activation
