// What autograd nodes with an activation share.
#pragma once

#include <ATen/ops/arange.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <string_view>

#include "activation/description.h"

namespace transformer_plugin::activation {

// The default key is not saved: a string costs an allocation in every forward.
inline void save_key(torch::autograd::AutogradContext* ctx, std::string_view key) {
  if (key != kDefaultKey) ctx->saved_data["activation"] = std::string(key);
}

inline std::string_view saved_key(torch::autograd::AutogradContext* ctx) {
  const auto key = ctx->saved_data.find("activation");
  return key == ctx->saved_data.end() ? kDefaultKey : std::string_view(key->second.toStringRef());
}

// `rows`, [T] or [T, columns], with zeros past the last group: callers of autograd may add up the gradients of all rows.
inline at::Tensor zero_past_groups(const at::Tensor& rows, const at::Tensor& group_sizes) {
  const at::Tensor end = group_sizes.clamp_min(0).sum();
  const at::Tensor past = at::arange(c10::Scalar(rows.sym_size(0)), end.options()).ge(end);
  return rows.masked_fill(rows.dim() == 2 ? past.unsqueeze(1) : past, 0.0);
}

}  // namespace transformer_plugin::activation
