// embedding: the rows of a table that indices name, with the table's gradient. The table may be sharded over ranks.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/tensor.h"
#include "linear/weights.h"
#include "sharded/gather_weight.h"
#include "sharded/reduce_gradient.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "embedding";

c10::SymInt check_embedding(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
                            const sharded::WeightShard& shard) {
  const Argument table{kOp, "weight", weight}, places{kOp, "indices", indices};
  check_dtype(table, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_dim(table, 2);
  check_dtype(places, {at::kLong, at::kInt});
  check_same_device(places, table);
  const c10::SymInt rows = unsharded_size(weight, shard);
  TP_CHECK_VALUE(!shard.is_sharded() || weight.sym_size(0) * shard.ranks >= shard.rows, kOp, "weight",
                 "a shard of the " << shard.rows << " rows on each of " << shard.ranks << " ranks",
                 describe(weight), "Shard the table as transformer_plugin.parallel.shard_ does");
  TP_CHECK_VALUE(padding_idx >= -1 && c10::SymInt(padding_idx) < rows, kOp, "padding_idx",
                 "-1 for none, or a row of the table", padding_idx, "Pass a row of the table");
  return rows;
}

// On a CPU. On a GPU torch's kernel ends the process's use of it, as that of torch.nn.functional.embedding does.
void check_range(const Tensor& indices, int64_t rows) {
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto [least, most] = at::aminmax(indices);
  const auto first = least.item<int64_t>(), last = most.item<int64_t>();
  TP_CHECK_VALUE(first >= 0 && last < rows, kOp, "indices", "rows of the table, 0 to " << rows - 1,
                 first << " to " << last, "Pass indices of rows");
}

Tensor embedding(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
                 std::string_view weight_shard) {
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  const c10::SymInt rows = check_embedding(indices, weight, padding_idx, shard);
  check_range(indices, rows.guard_int(__FILE__, __LINE__));
  const BelowAutograd guard;
  if (!shard.is_sharded()) return at::embedding(weight, indices, padding_idx);
  return at::embedding(sharded::gather_values(weight, shard, false), indices, padding_idx);
}

Tensor embedding_meta(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
                      std::string_view weight_shard) {
  check_embedding(indices, weight, padding_idx, sharded::parse_weight_shard(kOp, weight_shard));
  std::vector<c10::SymInt> sizes(indices.sym_sizes().begin(), indices.sym_sizes().end());
  sizes.push_back(weight.sym_size(1));
  return empty(weight, sizes, weight.scalar_type());
}

Tensor redispatch(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
                  std::string_view weight_shard) {
  const BelowAutograd guard;
  return ops::embedding(indices, weight, padding_idx, weight_shard);
}

class EmbeddingFunction : public DifferentiableOnce<EmbeddingFunction> {
 public:
  static constexpr const char* kName = "embedding";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& indices, const Tensor& weight,
                        int64_t padding_idx, std::string_view weight_shard) {
    ctx->save_for_backward({indices});
    ctx->saved_data["weight"] = weight;  // untracked: the gradient does not depend on its values
    ctx->saved_data["padding_idx"] = padding_idx;
    ctx->saved_data["weight_shard"] = std::string(weight_shard);
    return redispatch(indices, weight, padding_idx, weight_shard);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor indices = ctx->get_saved_variables()[0], weight = ctx->saved_data["weight"].toTensor();
    const int64_t padding_idx = ctx->saved_data["padding_idx"].toInt();
    const sharded::WeightShard shard =
        sharded::parse_weight_shard(kOp, ctx->saved_data["weight_shard"].toStringRef());
    const c10::SymInt rows = unsharded_size(weight, shard);
    Tensor grad = at::embedding_dense_backward_symint(grads[0], indices, rows, padding_idx, false);
    if (shard.is_sharded()) {
      if (weight.sym_size(0) * shard.ranks != rows) {
        const Tensor unsharded_grad = sharded::new_unsharded_grad(weight, shard, grad.scalar_type());
        unsharded_grad.narrow(0, 0, shard.rows).copy_(grad);
        grad = unsharded_grad;
      }
      const Tensor unsharded_grad = grad;
      grad = sharded::reduce_gradient(unsharded_grad, shard, {weight});
      if (grad.defined()) grad = sharded::finish_gradient(grad, unsharded_grad, weight, shard, Tensor());
    }
    return {Tensor(), grad, Tensor(), Tensor()};
  }
};

Tensor embedding_autograd(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
                          std::string_view weight_shard) {
  if (!any_requires_grad(weight)) return redispatch(indices, weight, padding_idx, weight_shard);
  check_embedding(indices, weight, padding_idx, sharded::parse_weight_shard(kOp, weight_shard));
  return EmbeddingFunction::apply(indices, weight, padding_idx, weight_shard);
}

}  // namespace

TP_IMPL(embedding, embedding, embedding_meta, embedding_autograd);

}  // namespace transformer_plugin::linear
