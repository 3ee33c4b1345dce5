// The gradient of a weight that is sharded over ranks (linear/main_grad.h).
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include "common/tensor.h"
#include "linear/main_grad.h"
#include "linear/products.h"
#include "sharded/foreign_weight.h"
#include "sharded/reduce_gradient.h"

namespace transformer_plugin::linear {

using at::Tensor;
using torch::autograd::variable_list;

// The gradient of the whole weight, of which each rank gets the sum over the ranks for its part.
Tensor WeightGradient::reduced(const Quantized& grad, const Quantized& input,
                               const std::optional<Tensor>& group_sizes, at::ScalarType dtype,
                               const gemm::LaunchOptions& options) const {
  const bool accumulates = ctx_->saved_data.find("overwrites") == ctx_->saved_data.end();
  at::ScalarType part_dtype = buffers_.empty() ? dtype : buffers_[0].scalar_type();
  if (shard_.bfloat16_parts && part_dtype == at::kFloat) part_dtype = at::kBFloat16;
  Tensor parts = sharded::gradient_parts(weight_, shard_, part_dtype);
  Tensor valid = parts.narrow(0, 0, shard_.rows);
  if (!is_grouped_ && group_sizes) valid = valid.unsqueeze(0);
  wgrad_into(grad, input, group_sizes, valid, false, options);
  if (buffers_.empty() || is_returned(parts)) {
    Tensor token = sharded::reduce_gradient(parts, shard_, {like_the_sum()});
    if (token.defined()) parts_ = parts;
    return token;
  }
  sharded::reduce_gradient(parts, shard_, {weight_, buffers_[0], accumulates});
  return {};
}

variable_list WeightGradient::foreign(const Quantized& grad, const Quantized& input,
                                      const std::optional<Tensor>& group_sizes, at::ScalarType dtype,
                                      const gemm::LaunchOptions& options) const {
  const at::TensorList shards = list_.empty() ? at::TensorList(weight_) : at::TensorList(list_);
  const std::vector<Tensor> unsharded = sharded::foreign_buffers(shards, shard_, dtype);
  const bool is_one_group = !is_grouped_ && group_sizes;
  wgrad_into(grad, input, group_sizes,
             is_one_group ? std::vector<Tensor>{unsharded[0].unsqueeze(0)} : unsharded, false, options);
  variable_list gradients = sharded::foreign_gradients(unsharded, shards, shard_);
  for (size_t i = 0; i < count_; ++i) {
    if (wants(i) && !gradients[i].defined()) refuse_capture("main_grad", place_, count_, false);
  }
  return gradients;
}

// Compiled code may pass copies of buffers, and write them back before an asynchronous sum has arrived. So there the node waits for
// the sum, and adds it.
bool WeightGradient::is_returned(const Tensor& parts) const { return is_traced(parts); }

// What the sum is like: the weight; for a buffer, in float32, in which it is added.
Tensor WeightGradient::like_the_sum() const {
  if (buffers_.empty()) return list_.empty() ? weight_ : sharded::stack_like(list_);
  const Tensor like = list_.empty() ? buffers_[0] : sharded::stack_like(list_target().main_grad);
  if (like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble) return like;
  return at::empty_symint(like.sym_sizes(), like.options().dtype(at::kFloat));
}

// The matrices of a sharded list that want a gradient, and their buffers.
sharded::ListTarget WeightGradient::list_target() const {
  sharded::ListTarget target{list_};
  for (size_t i = 0; i < count_; ++i) {
    if (!wants(i)) target.matrices[i] = Tensor();
  }
  if (buffers_.empty()) return target;
  target.main_grad = buffers_.size() == count_ ? buffers_ : buffers_[0].unbind(0);
  target.accumulate = ctx_->saved_data.find("overwrites") == ctx_->saved_data.end();
  return target;
}

// The gradients of the whole matrices of a list, which travel in one sum.
Tensor WeightGradient::reduced_list(const Quantized& grad, const Quantized& input,
                                    const std::optional<Tensor>& group_sizes, at::ScalarType dtype,
                                    const gemm::LaunchOptions& options) const {
  at::ScalarType part_dtype = buffers_.empty() ? dtype : buffers_[0].scalar_type();
  if (shard_.bfloat16_parts && part_dtype == at::kFloat) part_dtype = at::kBFloat16;
  Tensor stack = sharded::gradient_stack(list_, shard_, part_dtype);
  const Tensor valid = stack.narrow(1, 0, shard_.rows);
  const bool is_whole = count_ == 1 || valid.is_contiguous();
  wgrad_into(grad, input, group_sizes, is_whole ? std::vector<Tensor>{valid} : valid.unbind(0), false,
             options);
  parts_ = sharded::parts_of_stack(std::move(stack), shard_);
  if (!sharded::reduce_asynchronously(parts_, shard_, list_target())) {
    return sharded::reduce_gradient(parts_, shard_, {like_the_sum()});
  }
  parts_ = Tensor();
  return {};
}

void WeightGradient::finish(variable_list& computed, at::ScalarType dtype, const Tensor& after) const {
  if (list_.empty()) return finish(computed[0], dtype, after);
  if (!parts_.defined()) return;
  const Tensor sums = sharded::finish_gradient(computed[0], parts_, like_the_sum(), shard_, after);
  parts_ = Tensor();
  if (!buffers_.empty()) {
    sharded::write_sums(sums, list_target());
    computed = placeholders(dtype);
    return;
  }
  computed = count_ == 1 ? variable_list{sums} : sums.unbind(0);
  for (size_t i = 0; i < count_; ++i) {
    if (!wants(i)) computed[i] = Tensor();
  }
}

void WeightGradient::finish(Tensor& computed, at::ScalarType dtype, const Tensor& after) const {
  if (!parts_.defined()) return;
  computed = sharded::finish_gradient(computed, parts_, like_the_sum(), shard_, after);
  parts_ = Tensor();
  if (buffers_.empty()) return;
  Tensor buffer = buffers_[0];
  const bool accumulates = ctx_->saved_data.find("overwrites") == ctx_->saved_data.end();
  buffer.copy_(accumulates ? at::add(buffer, computed) : computed);
  computed = placeholders(dtype)[0];
}

}  // namespace transformer_plugin::linear
