// Handles of the ops of sharded. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"gather_weight", std::tuple<Tensor, Tensor, Tensor>(const Tensor& data, OptionalTensorArg scale_inv,
    OptionalTensorArg amax, std::string_view format, bool columnwise, bool backward, std::string_view shard)> gather_weight;
inline constexpr Op<"gather_weight_list", Tensor(TensorList shards, bool backward, std::string_view shard)> gather_weight_list;
inline constexpr Op<"reduce_gradient_out", void(const Tensor& unsharded_grad, const Tensor& weight, const Tensor& out,
    bool accumulate, std::string_view shard)> reduce_gradient_out;
inline constexpr Op<"start_reduce_gradient", Tensor(const Tensor& unsharded_grad, const Tensor& weight,
    std::string_view shard)> start_reduce_gradient;
inline constexpr Op<"finish_reduce_gradient", Tensor(const Tensor& work, const Tensor& unsharded_grad, const Tensor& weight,
    std::string_view shard, OptionalTensorArg depends_on)> finish_reduce_gradient;
inline constexpr Op<"configure_gathers", void(std::string_view group_name, int64_t distance, bool in_graphs)> configure_gathers;
inline constexpr Op<"clear_gathers", void(std::string_view group_name)> clear_gathers;
inline constexpr Op<"count_gathers", std::vector<int64_t>(std::string_view group_name)> count_gathers;
inline constexpr Op<"invalidate_prefetched", void()> invalidate_prefetched;
inline constexpr Op<"enter_gather_region", Tensor(const Tensor& input, std::string_view group_name)> enter_gather_region;
inline constexpr Op<"leave_gather_region", Tensor(const Tensor& output, std::string_view group_name)> leave_gather_region;

}  // namespace transformer_plugin::ops
