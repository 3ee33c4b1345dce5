// The weight of a layer as ops take it: one tensor, [N, K] or of a grouped layer [G, N, K], or a matrix [N, K] for each of G
// groups, at any addresses.
#pragma once

#include <string>
#include <string_view>

#include "common/buffers.h"
#include "common/check.h"
#include "common/quantized.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::linear {

// A weight with the names that errors use.
struct WeightArgument {
  const char* op;
  const char* name;
  at::TensorList tensors;

  bool is_list() const { return tensors.size() > 1; }
  const at::Tensor& first() const { return tensors[0]; }
  c10::SymInt rows() const { return first().sym_size(-2); }
  c10::SymInt columns() const { return first().sym_size(-1); }
  // Of a grouped layer.
  c10::SymInt groups() const {
    return is_list() ? c10::SymInt(static_cast<int64_t>(tensors.size())) : first().sym_size(0);
  }
  std::string first_name() const { return is_list() ? entry(name, 0) : name; }
};

// The arguments of an op for the buffers that its backward adds gradients of a weight to (linear/main_grad.h).
struct MainGrad {
  OptionalList buffers = {};              // one tensor of the weight's sizes, or a matrix for each group
  bool accumulate = true;                 // or write over what the buffers hold
  std::string_view weight_grad = "none";  // what autograd gets in place of the gradient
  std::optional<at::Tensor> queue = {};   // where the backward leaves the operands (linear/deferred_wgrad.h)

  bool given() const { return buffers || queue || !accumulate || weight_grad != "none"; }
};

// The weight of a grouped layer. A single matrix becomes a stack of one, so that several tensors are always a list.
class GroupedWeight {
 public:
  explicit GroupedWeight(at::TensorList given) : tensors_(given) {
    if (given.size() != 1 || !given[0].defined() || given[0].dim() != 2) return;
    stack_ = given[0].unsqueeze(0);
    tensors_ = stack_;
  }
  GroupedWeight(const GroupedWeight&) = delete;
  GroupedWeight& operator=(const GroupedWeight&) = delete;

  at::TensorList get() const { return tensors_; }

 private:
  at::Tensor stack_;
  at::TensorList tensors_;
};

// The first dimension of a weight; of the unsharded one where it is sharded over ranks.
c10::SymInt unsharded_size(const at::Tensor& weight, const sharded::WeightShard& shard);
// The rows of an unsharded matrix of a grouped weight.
c10::SymInt unsharded_rows(const WeightArgument& weight, const sharded::WeightShard& shard);

// Dtype, dimensions and device; of several matrices, that all are like the first.
void check_grouped_weight(const WeightArgument& weight, const Argument& input);
// The tensor that has the sizes named by `dim`: 0 the groups, 1 the rows, 2 the columns.
void check_weight_size(const WeightArgument& weight, int64_t dim, const c10::SymInt& expected,
                       const char* meaning);

}  // namespace transformer_plugin::linear
