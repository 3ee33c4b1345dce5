// Handles of the ops of routing. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"router_logits", Tensor(const Tensor& input, const Tensor& weight)> router_logits;
inline constexpr Op<"router_logits_with_tokens", std::tuple<Tensor, Tensor>(const Tensor& input,
    const Tensor& weight)> router_logits_with_tokens;
inline constexpr Op<"router_logits_backward", std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& input,
    const Tensor& weight, bool for_input, bool for_weight, OptionalTensorArg grad_tokens)> router_logits_backward;
inline constexpr Op<"topk_router", std::tuple<Tensor, Tensor>(const Tensor& logits, OptionalTensorArg expert_bias, int64_t topk,
    std::string_view score_function, bool pre_softmax, int64_t num_groups, int64_t group_topk, double scaling_factor,
    std::optional<int64_t> group_score_topk)> topk_router;
inline constexpr Op<"topk_router_with_load", std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& logits,
    OptionalTensorArg expert_bias, int64_t topk, std::string_view score_function, bool pre_softmax, int64_t num_groups,
    int64_t group_topk, double scaling_factor, std::optional<int64_t> group_score_topk)> topk_router_with_load;
inline constexpr Op<"topk_router_backward", Tensor(const Tensor& grad, const Tensor& logits, const Tensor& indices,
    std::string_view score_function, bool pre_softmax, double scaling_factor)> topk_router_backward;
inline constexpr Op<"router_scores", Tensor(const Tensor& logits, std::string_view score_function)> router_scores;
inline constexpr Op<"router_scores_backward", Tensor(const Tensor& grad, const Tensor& logits,
    std::string_view score_function)> router_scores_backward;
inline constexpr Op<"aux_loss", Tensor(const Tensor& scores, const Tensor& tokens_per_expert, const Tensor& total_tokens,
    int64_t topk, double coeff)> aux_loss;
inline constexpr Op<"aux_loss_backward", Tensor(const Tensor& grad, const Tensor& tokens_per_expert, const Tensor& total_tokens,
    SymInt tokens, int64_t topk, double coeff)> aux_loss_backward;
inline constexpr Op<"assign_slots", std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor& indices,
    int64_t first_expert, int64_t num_experts, SymInt capacity, int64_t alignment, int64_t total_experts)> assign_slots;
inline constexpr Op<"assign_weighted_slots", std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor& indices,
    const Tensor& weights, int64_t first_expert, int64_t num_experts, SymInt capacity, int64_t alignment,
    int64_t total_experts)> assign_weighted_slots;
inline constexpr Op<"count_tokens_per_expert", Tensor(const Tensor& indices, int64_t num_experts)> count_tokens_per_expert;
inline constexpr Op<"permute", std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor& tokens, const Tensor& indices,
    int64_t num_experts, SymInt capacity, int64_t alignment)> permute;
inline constexpr Op<"permute_backward", Tensor(const Tensor& grad, const Tensor& slot)> permute_backward;
inline constexpr Op<"permute_rows", Tensor(const Tensor& tokens, const Tensor& slot, const Tensor& source,
    OptionalTensorArg group_sizes)> permute_rows;
inline constexpr Op<"unpermute", Tensor(const Tensor& rows, const Tensor& slot, const Tensor& source,
    OptionalTensorArg weights)> unpermute;
inline constexpr Op<"unpermute_backward", std::tuple<Tensor, Tensor>(const Tensor& grad, OptionalTensorArg rows,
    const Tensor& slot, const Tensor& source, OptionalTensorArg weights)> unpermute_backward;

}  // namespace transformer_plugin::ops
