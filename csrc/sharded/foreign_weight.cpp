#include "sharded/foreign_weight.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "common/check.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

template <typename Signature>
c10::TypedOperatorHandle<Signature> foreign_op(const char* name) {
  const auto op =
      c10::Dispatcher::singleton().findSchema({std::string("transformer_plugin_foreign::") + name, ""});
  TP_CHECK_VALUE(op.has_value(), "linear", "weight_shard", "a key without 'handle' where nothing is attached",
                 "a handle", "Call transformer_plugin.parallel.attach_distributed_weights");
  return op->typed<Signature>();
}

}  // namespace

Tensor foreign_weight(const Tensor& part, const WeightShard& shard, bool backward) {
  static const auto op = foreign_op<Tensor(const Tensor&, int64_t, bool)>("materialize");
  return op.call(part, shard.handle, backward);
}

Tensor foreign_buffer(const Tensor& part, const WeightShard& shard, at::ScalarType dtype) {
  static const auto op = foreign_op<Tensor(const Tensor&, int64_t, int64_t, at::ScalarType)>("buffer");
  return op.call(part, shard.handle, shard.rows, dtype);
}

Tensor foreign_gradient(const Tensor& whole, const Tensor& part, const WeightShard& shard) {
  static const auto op = foreign_op<Tensor(const Tensor&, const Tensor&, int64_t)>("finalize");
  const Tensor gradient = op.call(whole, part, shard.handle);
  return gradient.dim() == part.dim() ? gradient : Tensor();
}

}  // namespace transformer_plugin::sharded
