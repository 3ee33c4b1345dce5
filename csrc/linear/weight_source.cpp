#include "linear/weight_source.h"

#include <string>

#include "linear/quantized_weight.h"
#include "linear/sharded_weight.h"
#include "quantize/ops/matrix_shape.h"
#include "sharded/external_weight.h"
#include "sharded/gather_weight.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;

// The weight that another runtime unshards now, in one direction. Several matrices without scales are put into `matrices`.
Quantized external_operand(at::TensorList shards, const sharded::WeightShard& shard,
                           const OperandFormats& formats, bool backward, std::vector<Tensor>& matrices) {
  sharded::ExternalWeight made = sharded::external_weight(shards, shard, formats.weight_key, backward);
  if (made.quantized.empty()) {
    QuantizedWeight weight = quantize_weight_operand(made.values, formats, backward);
    matrices = std::move(weight.matrices);
    return backward ? weight.backward : weight.forward;
  }
  made.quantized.resize(3);
  return {made.quantized[0],  quantize::typed_scale(made.quantized[1], formats.weight),
          made.quantized[2],  formats.weight,
          formats.weight_key, made.columnwise};
}

QuantizedWeight unsharded_by_runtime(const WeightSource& source, const OperandFormats& formats,
                                     bool backward) {
  QuantizedWeight result;
  result.forward = external_operand(source.tensors, source.shard, formats, false, result.matrices);
  if (backward) result.backward = {source.tensors[0], Tensor(), Tensor()};
  if (backward && source.shard.is_list) result.shards = source.tensors.vec();
  return result;
}

// Of a list the values are all-gathered, in one collective.
QuantizedWeight unsharded_list(const WeightSource& source, const OperandFormats& formats, bool backward) {
  const Tensor unsharded = sharded::gather_weight_list(source.tensors, source.shard, false);
  QuantizedWeight result = quantize_weight_operand(unsharded, formats, false);
  if (backward) result.shards = source.tensors.vec();
  return result;
}

QuantizedWeight own_weight(const WeightSource& source, const OperandFormats& formats, bool backward) {
  return source.quantized ? as_quantized_weight(*source.quantized, formats, backward)
                          : quantize_weight_operand(source.tensors, formats, backward);
}

// The ranks' quantized shards are all-gathered, or, where there are none, the values, which are quantized after that. A gather
// usually finds that the use of the weight before it has begun it (sharded/gather_cache.h). What is saved stays this rank's shard.
QuantizedWeight unsharded_weight(const WeightSource& source, const OperandFormats& formats, bool backward) {
  if (source.quantized || !formats.weight.is_quantized()) {
    QuantizedWeight own = own_weight(source, formats, backward);
    own.forward = sharded::gather_weight(own.forward, source.shard, false);
    return own;
  }
  const Quantized values{source.tensors[0], Tensor(), Tensor()};
  const Tensor unsharded = sharded::gather_values(values.data, source.shard, false);
  return {quantize_weight_operand(unsharded, formats, false).forward, backward ? values : Quantized{}};
}

}  // namespace

Tensor WeightSource::values(bool backward) const {
  return shard.is_sharded() ? sharded::gather_values(tensors[0], shard, backward) : tensors[0];
}

QuantizedWeight WeightSource::for_forward(const OperandFormats& formats, bool backward) const {
  if (!shard.is_sharded()) return own_weight(*this, formats, backward);
  if (shard.is_external()) return unsharded_by_runtime(*this, formats, backward);
  return shard.is_list ? unsharded_list(*this, formats, backward)
                       : unsharded_weight(*this, formats, backward);
}

WeightForBackward WeightSource::for_backward(const Quantized& saved, const OperandFormats& formats) const {
  if (!shard.is_sharded()) return {saved, tensors};
  WeightForBackward result;
  if (shard.is_external()) {
    const at::TensorList shards = shard.is_list ? tensors : at::TensorList(saved.data);
    result.values = external_operand(shards, shard, formats, true, result.unsharded_matrices);
  } else if (shard.is_list) {
    const Tensor unsharded = sharded::gather_weight_list(tensors, shard, true);
    result.values = quantize_weight_operand(unsharded, formats, true).backward;
  } else {
    result.values = sharded::gather_weight(saved, shard, true);
    if (!result.values.scale.defined() && formats.weight.is_quantized()) {
      result.values = quantize_weight_operand(result.values.data, formats, true).backward;
    }
  }
  return result;
}

void announce_use_in_backward(torch::autograd::AutogradContext* ctx, const char* main_grad,
                              const sharded::WeightShard& shard) {
  if (!shard.is_external()) return;
  const std::vector<Tensor> shards = saved_shards(ctx, main_grad, shard);
  if (!shards.empty()) sharded::external_weight(shards, shard, "none", true);
}

}  // namespace transformer_plugin::linear
