// Handles of the ops of expert_parallel. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"plan", std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor& topk_idx, int64_t num_experts,
    SymInt max_tokens, SymInt capacity, int64_t alignment, int64_t num_ranks, std::string_view group_name, bool raise_on_overflow,
    int64_t timeout_ms)> plan;
inline constexpr Op<"compact_plan", std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor& topk_idx,
    int64_t num_experts, SymInt max_tokens, SymInt capacity, int64_t alignment, int64_t num_ranks, std::string_view group_name,
    bool raise_on_overflow, int64_t timeout_ms, std::optional<SymInt> max_received_tokens, bool records)> compact_plan;
inline constexpr Op<"dispatch", std::tuple<Tensor, Tensor>(const Tensor& tokens, OptionalTensorArg topk_weights,
    const Tensor& slot, const Tensor& source, std::string_view group_name, int64_t timeout_ms, int64_t grads_needed, bool expand,
    OptionalTensorArg received, OptionalTensorArg position)> dispatch;
inline constexpr Op<"dispatch_out", void(const Tensor& tokens, OptionalTensorArg topk_weights, const Tensor& slot,
    const Tensor& source, const Tensor& recv, OptionalTensorArg recv_weights, std::string_view group_name, int64_t timeout_ms,
    int64_t grads_needed, OptionalTensorArg received, OptionalTensorArg position)> dispatch_out;
inline constexpr Op<"dispatch_backward", std::tuple<Tensor, Tensor>(OptionalTensorArg grad_recv,
    OptionalTensorArg grad_recv_weights, const Tensor& slot, SymInt num_tokens, SymInt hidden_size, ScalarType dtype,
    bool for_tokens, bool for_weights, std::string_view group_name, int64_t timeout_ms, bool expand, OptionalTensorArg received,
    OptionalTensorArg position)> dispatch_backward;
inline constexpr Op<"combine", Tensor(const Tensor& rows, const Tensor& slot, const Tensor& source, SymInt num_tokens,
    std::string_view group_name, int64_t timeout_ms, int64_t grads_needed, bool expand, OptionalTensorArg received,
    OptionalTensorArg position)> combine;
inline constexpr Op<"combine_backward", Tensor(const Tensor& grad, const Tensor& slot, const Tensor& source,
    std::string_view group_name, int64_t timeout_ms, bool expand, OptionalTensorArg received,
    OptionalTensorArg position)> combine_backward;
inline constexpr Op<"combine_backward_out", void(const Tensor& grad, const Tensor& slot, const Tensor& source,
    const Tensor& grad_rows, std::string_view group_name, int64_t timeout_ms, OptionalTensorArg received,
    OptionalTensorArg position)> combine_backward_out;
inline constexpr Op<"open_channel", std::string(std::string_view group_name, int64_t received_rows, int64_t returned_rows,
    int64_t record_bytes, int64_t num_experts, int64_t planned_rows, int64_t topk, int64_t timeout_ms,
    std::optional<c10::Device> device)> open_channel;
inline constexpr Op<"select_transport", std::tuple<std::string, std::string>(int64_t num_ranks, std::string_view device_type,
    bool peer_memory)> select_transport;

}  // namespace transformer_plugin::ops
