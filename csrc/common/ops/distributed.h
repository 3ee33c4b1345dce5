// Handles of the ops of distributed. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"all_gather_text", std::vector<std::string>(std::string_view group_name, std::string_view text,
    int64_t timeout_ms)> all_gather_text;
inline constexpr Op<"compare_header", void(std::string_view group_name, ScalarType dtype, int64_t width,
    int64_t timeout_ms)> compare_header;
inline constexpr Op<"peer_memory_support", std::tuple<bool, std::string>(std::string_view group_name, int64_t timeout_ms,
    std::optional<c10::Device> device)> peer_memory_support;
inline constexpr Op<"release_group", void(std::string_view group_name)> release_group;
inline constexpr Op<"symmetric_allocate", std::tuple<int64_t, std::string>(std::string_view group_name, int64_t num_bytes,
    int64_t timeout_ms, std::optional<c10::Device> device)> symmetric_allocate;
inline constexpr Op<"symmetric_empty", Tensor(std::string_view group_name, int64_t allocation,
    int64_t num_bytes)> symmetric_empty;
inline constexpr Op<"is_symmetric", bool(const Tensor& tensor)> is_symmetric;

}  // namespace transformer_plugin::ops
