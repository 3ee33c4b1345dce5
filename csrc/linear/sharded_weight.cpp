#include "linear/sharded_weight.h"

#include <string>

#include "common/tensor.h"
#include "linear/main_grad.h"

namespace transformer_plugin::linear {

using at::Tensor;
using torch::autograd::AutogradContext;

namespace {

void check_sharded_list(const WeightArgument& weight, const sharded::WeightShard& shard, bool is_quantized) {
  constexpr const char* name = "weight_shard";
  const bool is_list = weight.is_list() || (weight.first().dim() == 3 && weight.groups() == 1);
  const std::string& given = shard.key;
  TP_CHECK_VALUE(is_list, weight.op, name, "no 'list' for a weight of one tensor", "'" << given << "'",
                 "Pass a matrix for each group");
  TP_CHECK_VALUE(!is_quantized, weight.op, name, "no 'list' with a quantized weight", "'" << given << "'",
                 "Leave out the quantized weight: ranks exchange the values of a list");
  TP_CHECK_VALUE(
      weight.rows() * shard.ranks >= shard.rows, weight.op, weight.name,
      "a shard of the " << shard.rows << " rows of each matrix on each of " << shard.ranks << " ranks",
      describe(weight.first()), "Shard the matrices as transformer_plugin.parallel.shard_ does");
}

}  // namespace

void check_weight_shard(const WeightArgument& weight, const sharded::WeightShard& shard,
                        const MainGrad& main_grad, bool is_quantized) {
  if (!shard.is_sharded()) return;
  constexpr const char* name = "weight_shard";
  TP_CHECK_VALUE(!shard.is_external() || !is_traced(weight.first()), weight.op, weight.first_name(),
                 "eager code with a weight that another runtime gathers (attach_distributed_weights)",
                 "'" << shard.name << "' in code that is compiled, exported or traced",
                 "Leave the layer out with torch.compiler.disable(layer)");
  if (shard.is_list) {
    check_sharded_list(weight, shard, is_quantized);
  } else {
    TP_CHECK_VALUE(!weight.is_list(), weight.op, name,
                   "'' or a key with 'list' for a weight of several tensors", "'" << shard.key << "'",
                   "Pass the weight as one stack [G, N, K]");
    const c10::SymInt held = weight.first().sym_size(0) * shard.ranks;
    TP_CHECK_VALUE(held >= shard.rows, weight.op, weight.name,
                   "a shard of the " << shard.rows << " rows on each of " << shard.ranks << " ranks",
                   describe(weight.first()), "Shard the weight as transformer_plugin.parallel.shard_ does");
  }
  TP_CHECK_VALUE(!main_grad.queue, weight.op, name, "'' with a queue of weight gradients",
                 "'" << shard.key << "'", "Leave out the queue: ranks add gradients in the backward");
  TP_CHECK_VALUE(!main_grad.buffers || main_grad.buffers->size() == 1 || shard.is_list, weight.op,
                 "main_grad", "one buffer of the sizes of the weight", main_grad.buffers->size(),
                 "Pass one tensor");
}

namespace {

std::string shard_of(const char* name) { return std::string(name) + "_weight"; }

}  // namespace

void save_shards(AutogradContext* ctx, const char* name, at::TensorList weight,
                 const sharded::WeightShard& shard) {
  if (!shard.is_sharded()) return;
  const std::string key = shard_of(name);
  if (!shard.is_list) ctx->saved_data[key] = weight[0];
  for (size_t i = 0; shard.is_list && i < weight.size(); ++i) {
    ctx->saved_data[entry(key.c_str(), i)] = weight[i];
  }
}

std::vector<Tensor> saved_shards(AutogradContext* ctx, const char* name, const sharded::WeightShard& shard) {
  const std::string key = shard_of(name);
  if (shard.is_list) return saved_matrices(ctx, key.c_str());
  const auto found = ctx->saved_data.find(key);
  if (found == ctx->saved_data.end()) return {};
  return {found->second.toTensor()};
}

void save_weight_shard(AutogradContext* ctx, const sharded::WeightShard& shard) {
  if (shard.is_sharded()) ctx->saved_data["weight_shard"] = shard.key;
}

sharded::WeightShard saved_weight_shard(const AutogradContext* ctx) {
  const auto key = ctx->saved_data.find("weight_shard");
  if (key == ctx->saved_data.end()) return {};
  return sharded::parse_weight_shard("linear", key->second.toStringRef());
}

}  // namespace transformer_plugin::linear
