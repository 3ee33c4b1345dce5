#include "sharded/external_weight.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "common/check.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;

template <typename Signature>
c10::TypedOperatorHandle<Signature> external_op(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TP_CHECK_VALUE(op.has_value(), "linear", "weight_shard", "a key without 'handle' where nothing is attached",
                 "a handle", "Call transformer_plugin.parallel.attach_distributed_weights");
  return op->typed<Signature>();
}

}  // namespace

ExternalWeight external_weight(TensorList shards, const WeightShard& shard, std::string_view format,
                               bool backward) {
  using Signature = std::tuple<Tensors, Tensors, bool>(TensorList, int64_t, std::string_view, bool);
  static const auto op = external_op<Signature>("transformer_plugin_external::materialize");
  auto [values, quantized, columnwise] = op.call(shards, shard.handle, format, backward);
  return {std::move(values), std::move(quantized), columnwise};
}

Tensors external_buffers(TensorList shards, const WeightShard& shard, at::ScalarType dtype) {
  static const auto op = external_op<Tensors(TensorList, int64_t, int64_t, at::ScalarType)>(
      "transformer_plugin_external::buffers");
  return op.call(shards, shard.handle, shard.rows, dtype);
}

Tensors external_gradients(TensorList unsharded, TensorList shards, const WeightShard& shard) {
  static const auto op =
      external_op<Tensors(TensorList, TensorList, int64_t)>("transformer_plugin_external::finalize");
  Tensors gradients = op.call(unsharded, shards, shard.handle);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].dim() != shards[i].dim()) gradients[i] = Tensor();
  }
  return gradients;
}

}  // namespace transformer_plugin::sharded
