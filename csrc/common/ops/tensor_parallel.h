// Handles of the ops of tensor_parallel. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"all_gather", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms,
    int64_t needs_grad)> all_gather;
inline constexpr Op<"reduce_scatter", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms, int64_t needs_grad)> reduce_scatter;
inline constexpr Op<"all_gather_list_out", void(TensorList inputs, TensorList out, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms)> all_gather_list_out;
inline constexpr Op<"reduce_scatter_out", void(const Tensor& input, const Tensor& out, bool accumulate, int64_t num_ranks,
    std::string_view group_name, int64_t timeout_ms, double factor)> reduce_scatter_out;
inline constexpr Op<"start_all_gather", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms, int64_t needs_grad)> start_all_gather;
inline constexpr Op<"finish_all_gather", Tensor(const Tensor& work, const Tensor& input, int64_t num_ranks,
    std::string_view group_name, int64_t timeout_ms, OptionalTensorArg depends_on)> finish_all_gather;
inline constexpr Op<"start_reduce_scatter", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms, int64_t needs_grad)> start_reduce_scatter;
inline constexpr Op<"finish_reduce_scatter", Tensor(const Tensor& work, const Tensor& input, int64_t num_ranks,
    std::string_view group_name, int64_t timeout_ms, OptionalTensorArg depends_on)> finish_reduce_scatter;
inline constexpr Op<"all_reduce", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms)> all_reduce;
inline constexpr Op<"copy_to_group", Tensor(const Tensor& input, int64_t num_ranks, std::string_view group_name,
    int64_t timeout_ms)> copy_to_group;
inline constexpr Op<"vocab_parallel_cross_entropy", Tensor(const Tensor& logits, const Tensor& target, int64_t vocabulary,
    int64_t num_ranks, std::string_view group_name, double label_smoothing, int64_t ignore_index,
    int64_t timeout_ms)> vocab_parallel_cross_entropy;
inline constexpr Op<"vocab_parallel_cross_entropy_forward", std::tuple<Tensor, Tensor>(const Tensor& logits, const Tensor& target,
    int64_t vocabulary, int64_t num_ranks, std::string_view group_name, double label_smoothing, int64_t ignore_index,
    int64_t timeout_ms)> vocab_parallel_cross_entropy_forward;
inline constexpr Op<"vocab_parallel_cross_entropy_backward", Tensor(const Tensor& grad, const Tensor& logits,
    const Tensor& target, const Tensor& stats, int64_t vocabulary, int64_t num_ranks, std::string_view group_name,
    double label_smoothing, int64_t ignore_index)> vocab_parallel_cross_entropy_backward;

}  // namespace transformer_plugin::ops
