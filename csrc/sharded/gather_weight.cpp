// gather_weight: the tensors of one direction of a weight, from those that each rank quantized from its rows. The ops
// configure_gathers, clear_gathers, count_gathers and invalidate_prefetched control the prefetches of gather_cache.h.
#include "sharded/gather_weight.h"

#include <ATen/ops/empty.h>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/ops/sharded.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/matrix_shape.h"
#include "sharded/group_weights.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kOp = "gather_weight";

size_t tensors_of(const Format& format) { return format.is_nv() ? 3 : (format.is_quantized() ? 2 : 1); }

void check_format(const Format& format, std::string_view key) {
  TP_CHECK_VALUE(!format.tiled_scales && !format.row_scaled, kOp, "format",
                 "a format without 'tiled' and 'row_scaled', whose scales do not follow the rows",
                 "'" << key << "'", "Quantize the weight to another format");
}

constexpr const char* kNames[] = {"data", "scale_inv", "amax"};

Gather checked(const Tensor& data, const OptionalTensor& scale_inv, const OptionalTensor& amax,
               std::string_view format_key, bool columnwise, bool backward, std::string_view shard_key) {
  std::vector<Tensor> shards{data};
  if (scale_inv) shards.push_back(*scale_inv);
  if (amax) shards.push_back(*amax);
  Gather gather{shards, parse_format(kOp, "format", format_key), columnwise, backward,
                parse_weight_shard(kOp, shard_key)};
  const size_t count = tensors_of(gather.format);
  TP_CHECK_VALUE(gather.shard.is_sharded(), kOp, "shard", "the key of a weight that is sharded over ranks",
                 "''", "Read an unsharded weight as it is");
  TP_CHECK_VALUE(
      !gather.shard.is_external(), kOp, "shard", "a key without 'handle'", "'" << shard_key << "'",
      "A weight that another runtime gathers cannot have this recipe: use one without delayed scaling");
  TP_CHECK_VALUE(!gather.shard.is_list, kOp, "shard", "a key without 'list'", "'" << shard_key << "'",
                 "Gather several matrices with gather_weight_list");
  TP_CHECK_VALUE(scale_inv.has_value() == (count > 1), kOp, "scale_inv",
                 (count > 1 ? "the scales" : "None") << " of '" << format_key << "'",
                 describe(or_undefined(scale_inv)), "Pass what quantizing this rank's shard gave");
  TP_CHECK_VALUE(amax.has_value() == (count > 2), kOp, "amax",
                 (count > 2 ? "the amax" : "None") << " of '" << format_key << "'",
                 describe(or_undefined(amax)), "Only nvfp4 has one beside its scales");
  check_format(gather.format, format_key);
  for (size_t i = 0; i < count; ++i) {
    const Argument local{kOp, kNames[i], shards[i]};
    tensor_parallel::check_exchange(local, gather.shard.ranks, gather.shard.timeout_ms);
    check_contiguous(local);
    check_same_device(local, {kOp, "data", shards[0]});
    check_no_gradient(local, "Detach it: the layer that reads the weight has the gradient");
  }
  const int64_t dim = shards[0].dim();
  TP_CHECK_VALUE(dim == 2 || dim == 3, kOp, "data", "a matrix, or a stack of matrices", describe(shards[0]),
                 "Pass this rank's shard of a weight");
  const auto layouts =
      buffer_layouts(shards[0], count, gather.format, columnwise, gather.shard.rows, gather.shard.ranks);
  for (size_t i = 0; i < count; ++i) {
    TP_CHECK_VALUE(shards[i].sizes() == at::IntArrayRef(layouts[i].shard), kOp, kNames[i],
                   "the sizes " << at::IntArrayRef(layouts[i].shard) << " beside 'data'", describe(shards[i]),
                   "Pass the tensors that quantizing this rank's shard gave");
  }
  const int64_t rows =
      dim == 3 || !columnwise ? shards[0].size(0) : shards[0].size(1) * gather.format.packing();
  TP_CHECK_VALUE(rows * gather.shard.ranks >= gather.shard.rows, kOp, "data",
                 "at least " << (gather.shard.rows + gather.shard.ranks - 1) / gather.shard.ranks
                             << " of the " << gather.shard.rows << " rows",
                 describe(shards[0]), "Shard the weight with zero rows after it");
  for (const BufferLayout& layout : layouts) {
    TP_CHECK_VALUE(rows % layout.rows == 0, kOp, "data",
                   "a multiple of " << layout.rows << " rows, the block of the format", rows,
                   "Shard the weight in steps of blocks");
  }
  return gather;
}

// In place of a tensor that does not exist. Without an allocator, which takes the host as long as for a weight.
Tensor no_elements(const Tensor& like) {
  if (is_traced(like) || like.is_meta()) return empty(like, {0}, at::kFloat);
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, like.device()), nullptr,
                       false);
  const auto key = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                  caffe2::TypeMeta::Make<float>());
}

Three as_three(std::vector<Tensor> tensors, const Tensor& like) {
  const auto at = [&](size_t i) { return tensors.size() > i ? tensors[i] : no_elements(like); };
  return {at(0), at(1), at(2)};
}

// Without other ranks: what is left when the padding is cut off.
std::vector<Tensor> stripped(const Gather& gather) {
  std::vector<Tensor> unsharded;
  const auto layouts = buffer_layouts(gather.shards[0], gather.shards.size(), gather.format,
                                      gather.columnwise, gather.shard.rows, 1);
  for (size_t i = 0; i < layouts.size(); ++i) {
    const Tensor& local = gather.shards[i];
    if (!layouts[i].is_gathered() || layouts[i].is_joined()) {
      unsharded.push_back(layouts[i].is_gathered() ? local.narrow(0, 0, layouts[i].unsharded[0]) : local);
    } else {
      unsharded.push_back(at::empty(layouts[i].unsharded, local.options()));
      assemble(layouts[i], local, 1, unsharded[i]);
    }
  }
  return unsharded;
}

Three gather_weight_kernel(const Tensor& data, const OptionalTensor& scale_inv, const OptionalTensor& amax,
                           std::string_view format, bool columnwise, bool backward, std::string_view shard) {
  Gather gather = checked(data, scale_inv, amax, format, columnwise, backward, shard);
  const std::vector<Tensor> shards = gather.shards;
  const BelowAutograd guard;
  std::vector<Tensor> unsharded;
  if (gather.shard.ranks == 1) {
    unsharded = stripped(gather);
  } else {
    distributed::RankGroup group(kOp, gather.shard.group, gather.shard.timeout_ms, shards[0]);
    GroupWeights& weights = GroupWeights::of(group.state());
    unsharded = weights.gathers.take(std::move(gather));
    weights.reductions.enqueue();
  }
  for (size_t i = 0; i < unsharded.size(); ++i) {  // an op does not return its argument
    if (unsharded[i].is_alias_of(shards[i])) unsharded[i] = unsharded[i].clone(at::MemoryFormat::Contiguous);
  }
  return as_three(std::move(unsharded), shards[0]);
}

Three gather_weight_meta(const Tensor& data, const OptionalTensor& scale_inv, const OptionalTensor& amax,
                         std::string_view format, bool columnwise, bool backward, std::string_view shard) {
  const Gather gather = checked(data, scale_inv, amax, format, columnwise, backward, shard);
  const std::vector<Tensor>& shards = gather.shards;
  std::vector<Tensor> unsharded;
  const auto layouts = buffer_layouts(shards[0], shards.size(), gather.format, columnwise, gather.shard.rows,
                                      gather.shard.ranks);
  for (size_t i = 0; i < layouts.size(); ++i) {
    unsharded.push_back(
        at::empty(layouts[i].is_gathered() ? layouts[i].unsharded : layouts[i].shard, shards[i].options()));
  }
  return as_three(std::move(unsharded), shards[0]);
}

void configure_gathers(std::string_view group_name, int64_t distance, bool in_graphs) {
  TP_CHECK_VALUE(distance >= 0, "configure_gathers", "distance", "at least 0", distance,
                 "Pass how many weights ahead are gathered");
  distributed::RankGroup group("configure_gathers", group_name, -1, Tensor());
  GroupWeights::of(group.state()).gathers.configure(distance, in_graphs);
}

void clear_gathers(std::string_view group_name) {
  distributed::RankGroup group("clear_gathers", group_name, -1, Tensor());
  GroupWeights::of(group.state()).gathers.clear();
}

std::vector<int64_t> count_gathers(std::string_view group_name) {
  distributed::RankGroup group("count_gathers", group_name, -1, Tensor());
  const GatherCounts counts = GroupWeights::of(group.state()).gathers.counts();
  return {counts.gathers, counts.early, counts.hits, counts.dropped, counts.bytes_sent};
}

}  // namespace

Quantized gather_weight(const Quantized& local, const WeightShard& shard, bool backward) {
  const std::string_view key = local.scale.defined() ? local.key : std::string_view("none");
  auto [data, scale, amax] = ops::gather_weight(local.data, as_optional(local.scale), as_optional(local.amax),
                                                key, local.transposed, backward, shard.key);
  Quantized unsharded = local;
  unsharded.data = data;
  if (local.scale.defined()) unsharded.scale = quantize::typed_scale(scale, local.format);
  if (local.amax.defined()) unsharded.amax = amax;
  return unsharded;
}

Tensor gather_values(const Tensor& local, const WeightShard& shard, bool backward) {
  return gather_weight({local, Tensor(), Tensor()}, shard, backward).data;
}

TP_IMPL_NO_GRADIENT(gather_weight, gather_weight_kernel, gather_weight_meta);
TP_IMPL_FOR(CompositeExplicitAutograd, configure_gathers, configure_gathers);
TP_IMPL_FOR(CompositeExplicitAutograd, clear_gathers, clear_gathers);
TP_IMPL_FOR(CompositeExplicitAutograd, count_gathers, count_gathers);
TP_IMPL_FOR(CompositeExplicitAutograd, invalidate_prefetched, invalidate_prefetched);

}  // namespace transformer_plugin::sharded
