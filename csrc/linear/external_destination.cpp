#include "linear/external_destination.h"

#include <utility>

#include "linear/products.h"
#include "sharded/external_weight.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

class ExternalDestination : public WgradDestination {
 public:
  ExternalDestination(const WeightInputs& weight, std::vector<Tensor> shards,
                      const sharded::WeightShard& shard)
      : weight_(weight), shards_(std::move(shards)), shard_(shard) {}

  bool follows_unshard() const override { return true; }

  variable_list compute(const WgradProduct& product) override {
    const auto& [grad, input, group_sizes, dtype, options] = product;
    const std::vector<Tensor> unsharded = sharded::external_buffers(shards_, shard_, dtype);
    const bool is_one_group = !weight_.is_grouped && group_sizes;
    wgrad_into(grad, input, group_sizes,
               is_one_group ? std::vector<Tensor>{unsharded[0].unsqueeze(0)} : unsharded, false, options);
    variable_list gradients = sharded::external_gradients(unsharded, shards_, shard_);
    for (size_t i = 0; i < weight_.count; ++i) {
      if (weight_.needs_grad(i) && !gradients[i].defined()) refuse_capture(weight_, "main_grad", false);
    }
    return gradients;
  }

 private:
  const WeightInputs weight_;
  const std::vector<Tensor> shards_;
  const sharded::WeightShard& shard_;
};

}  // namespace

std::unique_ptr<WgradDestination> external_destination(const WeightInputs& weight, std::vector<Tensor> shards,
                                                       const sharded::WeightShard& shard) {
  return std::make_unique<ExternalDestination>(weight, std::move(shards), shard);
}

}  // namespace transformer_plugin::linear
