#include "linear/reduce_scatter_destination.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "common/tensor.h"
#include "linear/products.h"
#include "sharded/reduce_gradient.h"
#include "sharded/reduce_gradient_list.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// The gradient of the unsharded weight is computed into a buffer, `sent_`. Its reduce-scatter overlaps with the data gradient unless
// something needs the sum earlier (sharded/reduce_gradient.h).
class ReduceScatterDestination : public WgradDestination {
 public:
  ReduceScatterDestination(const WeightInputs& weight, SavedMainGrad main_grad, std::vector<Tensor> shards,
                           const sharded::WeightShard& shard)
      : weight_(weight), main_grad_(std::move(main_grad)), shards_(std::move(shards)), shard_(shard) {}

  bool goes_first() const override { return true; }

 protected:
  bool has_buffers() const { return !main_grad_.buffers.empty(); }

  // Of the gradients that travel.
  at::ScalarType sent_dtype(at::ScalarType dtype) const {
    const at::ScalarType own = has_buffers() ? main_grad_.buffers[0].scalar_type() : dtype;
    return shard_.reduce_in_bfloat16 && own == at::kFloat ? at::kBFloat16 : own;
  }

  // What the sum for a buffer is like: the buffer, in float32, in which the sum is added.
  static Tensor like_sum_for(const Tensor& buffer) {
    if (buffer.scalar_type() == at::kFloat || buffer.scalar_type() == at::kDouble) return buffer;
    return at::empty_symint(buffer.sym_sizes(), buffer.options().dtype(at::kFloat));
  }

  const WeightInputs weight_;
  const SavedMainGrad main_grad_;
  const std::vector<Tensor> shards_;
  const sharded::WeightShard& shard_;
  // Of the reduce-scatter, if finish() has to wait for it.
  Tensor sent_;
  // Of what autograd gets.
  at::ScalarType dtype_ = at::kFloat;
};

// One tensor, [N, K] or [G, N, K], sharded along its first dimension.
class ShardDestination final : public ReduceScatterDestination {
 public:
  using ReduceScatterDestination::ReduceScatterDestination;

  variable_list compute(const WgradProduct& product) override {
    dtype_ = product.dtype;
    const Tensor sent = sharded::new_unsharded_grad(shards_[0], shard_, sent_dtype(dtype_));
    Tensor valid = sent.narrow(0, 0, shard_.rows);
    if (!weight_.is_grouped && product.group_sizes) valid = valid.unsqueeze(0);
    wgrad_into(product.grad, product.input, product.group_sizes, valid, false, product.options);
    // Compiled code may pass copies of buffers, and write them back before an asynchronous sum has arrived. So there the node
    // waits for the sum, and adds it.
    if (has_buffers() && !is_traced(sent)) {
      sharded::reduce_gradient(sent, shard_, {shards_[0], main_grad_.buffers[0], main_grad_.accumulate});
      return placeholders(weight_, main_grad_, dtype_);
    }
    Tensor work = sharded::reduce_gradient(sent, shard_, {like_the_sum()});
    if (!work.defined()) return placeholders(weight_, main_grad_, dtype_);
    sent_ = sent;
    return {std::move(work)};
  }

  void finish(variable_list& computed, const Tensor& depends_on) override {
    if (!sent_.defined()) return;
    Tensor& sum = computed[0];
    sum = sharded::finish_gradient(sum, sent_, like_the_sum(), shard_, depends_on);
    sent_ = Tensor();
    if (!has_buffers()) return;
    Tensor buffer = main_grad_.buffers[0];
    buffer.copy_(main_grad_.accumulate ? at::add(buffer, sum) : sum);
    computed = placeholders(weight_, main_grad_, dtype_);
  }

 private:
  Tensor like_the_sum() const { return has_buffers() ? like_sum_for(main_grad_.buffers[0]) : shards_[0]; }
};

// Matrices [N, K], each of which is sharded by rows. Their gradients travel in one reduce-scatter.
class ShardListDestination final : public ReduceScatterDestination {
 public:
  using ReduceScatterDestination::ReduceScatterDestination;

  variable_list compute(const WgradProduct& product) override {
    dtype_ = product.dtype;
    Tensor stack = sharded::gradient_stack(shards_, shard_, sent_dtype(dtype_));
    const Tensor valid = stack.narrow(1, 0, shard_.rows);
    const bool is_whole = weight_.count == 1 || valid.is_contiguous();
    wgrad_into(product.grad, product.input, product.group_sizes,
               is_whole ? std::vector<Tensor>{valid} : valid.unbind(0), false, product.options);
    sent_ = sharded::shards_of_stack(std::move(stack), shard_);
    if (sharded::reduce_asynchronously(sent_, shard_, list_target())) {
      sent_ = Tensor();
      return placeholders(weight_, main_grad_, dtype_);
    }
    Tensor work = sharded::reduce_gradient(sent_, shard_, {like_the_sum()});
    if (!work.defined()) return placeholders(weight_, main_grad_, dtype_);
    return {std::move(work)};
  }

  void finish(variable_list& computed, const Tensor& depends_on) override {
    if (!sent_.defined()) return;
    const Tensor sums = sharded::finish_gradient(computed[0], sent_, like_the_sum(), shard_, depends_on);
    sent_ = Tensor();
    if (!has_buffers()) {
      computed = weight_.split(sums);
      return;
    }
    sharded::write_sums(sums, list_target());
    computed = placeholders(weight_, main_grad_, dtype_);
  }

 private:
  Tensor like_the_sum() const {
    if (!has_buffers()) return sharded::stack_like(shards_);
    return like_sum_for(sharded::stack_like(list_target().main_grad));
  }

  // The matrices that need a gradient, and their buffers.
  sharded::ListTarget list_target() const {
    sharded::ListTarget target{shards_};
    for (size_t i = 0; i < weight_.count; ++i) {
      if (!weight_.needs_grad(i)) target.matrices[i] = Tensor();
    }
    if (!has_buffers()) return target;
    const std::vector<Tensor>& buffers = main_grad_.buffers;
    target.main_grad = buffers.size() == weight_.count ? buffers : buffers[0].unbind(0);
    target.accumulate = main_grad_.accumulate;
    return target;
  }
};

}  // namespace

std::unique_ptr<WgradDestination> reduce_scatter_destination(const WeightInputs& weight,
                                                             SavedMainGrad main_grad,
                                                             std::vector<Tensor> shards,
                                                             const sharded::WeightShard& shard) {
  if (shard.is_list) {
    return std::make_unique<ShardListDestination>(weight, std::move(main_grad), std::move(shards), shard);
  }
  return std::make_unique<ShardDestination>(weight, std::move(main_grad), std::move(shards), shard);
}

}  // namespace transformer_plugin::linear
